"""Which runs and tasks begin, and when."""
