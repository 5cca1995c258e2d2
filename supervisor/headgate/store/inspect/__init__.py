"""Read-only queries for the command line and other tools."""
