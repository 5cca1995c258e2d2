"""Engines, transactions, prepared statements, times and secrets."""
