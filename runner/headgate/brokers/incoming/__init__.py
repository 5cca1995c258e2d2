"""What senders of webhooks meet: a listener of HTTP in the runner, and the check of their signatures."""
