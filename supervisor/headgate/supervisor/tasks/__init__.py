"""The supervisor's duties for tasks: outcomes, dispatch, scheduling, DAG files."""
