"""The supervisor: one thread that owns the database and keeps a runner of users' triggers alive.

`arbiter` is the loop, `core` decides, `triggers.intake` stores the events of the runner. Nothing in here imports users'
code.
"""
