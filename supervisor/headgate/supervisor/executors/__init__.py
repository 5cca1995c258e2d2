"""Where steps of tasks run: `base` is what the supervisor expects of any executor, `local` is a pool of processes."""
