"""DAGs, runs, tasks, deferrals and the values that tasks read."""
