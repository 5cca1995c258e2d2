"""Leases, claims, events, dead letters, watchers and assets."""
