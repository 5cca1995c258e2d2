"""What supervisors write down for people to look at: nothing that headgate does depends on it."""
