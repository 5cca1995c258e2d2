"""The log of captured frames."""
