"""Operators that decide about signals, endless tasks and starts by the time, in the simulation of signals.

The modules are those of `tests.proof.simulation.tasks.signals.rules`, of which this package is the rest, with
`deciding` (the workers that decide) and `reading` (what the database says of all this). Its checker goes on in `runs`.
"""
