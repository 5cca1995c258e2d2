"""The log of signals: how they are sent, read, and forgotten."""
