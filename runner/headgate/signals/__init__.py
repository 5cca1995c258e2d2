"""Signals for authors: values under keys, which tasks and triggers send, and tasks list and hear (docs/signals.md)."""

from headgate.signals.base import BaseSignalService, Signal, SignalVersion
from headgate.signals.listening import Heard, SignalWatcher, StopListening
from headgate.signals.outgoing import TooManySignals
from headgate.signals.service import SignalService

__all__ = [
    "BaseSignalService",
    "Heard",
    "Signal",
    "SignalService",
    "SignalVersion",
    "SignalWatcher",
    "StopListening",
    "TooManySignals",
]
