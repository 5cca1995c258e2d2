"""Mapped tasks in the simulation: what a seed means for one, what is promised of it, and deliberate bugs."""
