"""What the benchmarks' pairs run: triggers as a user would write them. Imported by the runner alone."""
