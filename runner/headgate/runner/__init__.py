"""The trigger runner: the trio process that runs triggers and shared streams, and never sees a database."""
