"""The part that the runner and the task workers share: queries, logs, output, the parent's death."""
