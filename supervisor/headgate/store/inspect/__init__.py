"""Queries by which people look at the database."""
