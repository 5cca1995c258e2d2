"""Mapped tasks, for their authors: what a task can be expanded over, and what its instances leave."""
