"""Traces of runs, for a collector of OpenTelemetry: made of what the database knows, by a process beside all others.

It needs the extra `otel` of the package.
"""
