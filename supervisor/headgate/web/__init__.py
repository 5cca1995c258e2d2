"""The pages: a process of its own that reads the database, and can neither write to it nor decrypt anything in it."""
