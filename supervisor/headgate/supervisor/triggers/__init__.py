"""The supervisor's duties for triggers: intake, leases, assignments, queries."""
