"""Deletion of what belongs together, in pieces that fit a transaction each."""
