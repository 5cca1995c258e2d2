"""The processes of the supervisor: spawned, watched, reaped, and the links to them."""
