"""Four DAGs that run as they are; ``headgate examples DIR`` copies them to a folder of yours."""
