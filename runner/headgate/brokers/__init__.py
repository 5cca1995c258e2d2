"""Brokers: the producers that bring messages into shared streams, one module a broker.

`headgate.brokers.filelog` is the embedded one; it needs nothing but a folder.
"""
