"""Metrics of one supervisor: what is counted, the counts, and the thread that answers scrapes and health checks.

Nothing here knows the core. The parts of the supervisor add to `figures.Figures`; `headgate.supervisor.reporting` reads
the rest from the core when somebody asks.
"""
