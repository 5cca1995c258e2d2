"""The simulation: both halves of the pair in one process, one thread and one simulated time, from one seed.

What is real: the supervisor's core with its intake, leases and assignments, the store on SQLite in memory, both
links with their framing, the runner's session, host, outbox and shared streams. What is simulated: time, the
processes and how they die, the bytes between them, the broker, and what users wrote.

The modules, from the inside out: `scenario` (what there is to a scenario) and `drawing` (what a seed means), `records`
(what a history is made of), `broker`, `triggers`, `wire` and `database` (the simulated surroundings), `world`
(processes and faults), `users` (what users do with dead letters and with stored events), `checker` (judges a history,
and knows nothing of the code under test), `judging` (runs and shrinks), `mutants` (deliberate bugs, to see that all
this can fail).

`tests.proof.simulation.tasks` is the same with tasks: it has seeds of its own, which mean DAGs, workers and users.
"""
