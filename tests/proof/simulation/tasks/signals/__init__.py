"""Signals in the simulation: a family of seeds of their own, with senders, sensors, listeners, watchers and users.

The modules, from the inside out: `plans` (what a task, a user and a watcher do with signals), `sensing` (the sensor),
`records`, `rehearsal` (code of an author that asks its supervisor), `surroundings` (workers, watchers, the database),
`world`, `books` and `checker` (which know nothing of the code under test), `drawing` (what a seed means), `directed`,
`mutants`; and the packages `rules`, `jobs` and `runs`, of which the last has the checker of all.

What else is done for signals has its plan in `plans`, its book beside `SensorWait` in `books`, and its verb among
`tests.proof.simulation.tasks.transitions`.
"""
