"""Values, moments and spans of time as people read and write them, on command lines and on pages."""
