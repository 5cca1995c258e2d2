"""Groups of tasks, which are joined to others, expanded and repeated as one."""
