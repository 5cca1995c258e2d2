"""Frames, sessions and connections of a link: bytes in, messages out."""
