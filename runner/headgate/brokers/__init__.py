"""Brokers: the producers that read messages for shared streams.

`headgate.brokers.filelog` is the embedded one; it needs only a folder.
"""
