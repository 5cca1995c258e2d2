"""The command line: `headgate.cli.main` puts the commands together, each module beside it holds some of them.

Commands import the store, the supervisor and SQLAlchemy only when they run, so that ``headgate --help`` is quick.
"""
