"""Triggers and tasks that the benchmarks run, written as a user would. Imported by the runner only."""
