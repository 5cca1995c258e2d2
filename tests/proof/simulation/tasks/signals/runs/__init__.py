"""Runs that signals start and end, in the simulation: a DAG that has a run for signals, or is started with one by hand.

The modules are those of the package beside it, `tests.proof.simulation.tasks.signals.rules`; `reading` is what the
database says of such runs. The checker is the whole of all these packages.
"""
