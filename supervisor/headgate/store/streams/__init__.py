"""The streams of tasks as rows, and what becomes of their events without a step (I20, I24)."""
