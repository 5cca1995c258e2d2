"""Executors of steps of tasks: `base` is the interface of any executor, `local` a pool of processes."""
