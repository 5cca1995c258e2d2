"""`crash_test`: a producer killed at every mark, and judged by its history."""
