"""Who may do what, and who has done what: the audit of all acts of users."""
