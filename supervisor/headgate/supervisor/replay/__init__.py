"""The capture of frames, and their replay against a fresh supervisor."""
