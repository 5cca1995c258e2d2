"""What trigger authors write against, and the triggers that come ready-made."""
