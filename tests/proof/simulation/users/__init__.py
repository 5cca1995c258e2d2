"""What users do with dead letters and with stored events, and the books by which that is judged."""
