"""The supervisor: one thread that owns the database and keeps a runner of users' triggers alive.

`arbiter` is the loop, `intake` stores what the runner fires, `config` and `logs` set both up. Nothing in
here imports users' code.
"""
