"""The task worker: a synchronous process that runs steps of tasks and DAG files, one at a time."""
