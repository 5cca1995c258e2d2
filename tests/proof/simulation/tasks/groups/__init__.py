"""Mapped groups, loops, worklists and elements in the simulation: a family of seeds of their own.

The modules, from the inside out: `drawing` (what a seed means), `checker`, `directed`, `mutants`. How such tasks are
mapped is said in `tests.proof.simulation.tasks.maps.plans`.
"""
