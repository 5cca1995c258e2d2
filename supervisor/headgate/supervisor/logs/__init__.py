"""Logs of the supervisor, and of each try of a task."""
