"""Queries that only the pages ask: grids of many tasks, assets, and a search."""
