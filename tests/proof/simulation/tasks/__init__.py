"""The simulation of tasks: what `tests.proof.simulation` is, with DAGs, workers and users, from a seed space of its
own.

What is real beside the pair: the supervisor's part for tasks (`TaskCore`), the scheduler, the answers, all verbs of the
store for tasks, and `headgate.tasks.execution.run_step`. What is simulated: the workers as processes (an executor whose
workers take time, die, are stopped, answer late or twice, and lose their links), the DAG files, and the users.

The modules, from the inside out: `scenario` (what a seed means), `records`, `dags` (operators and triggers that do what
the scenario says), `executor`, `database` (what changed, read with SQL of its own, and a store that fails), `world`,
`rules` and `checker` (which know nothing of the code under test), `mutants`. The packages beside them have what
concerns streams, maps, groups and signals; groups and signals have seeds of their own.
"""
