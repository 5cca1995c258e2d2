"""Signals for authors: values under keys, which tasks and triggers send, and tasks list and hear (docs/signals.md)."""

from headgate.signals.listening import SignalWatcher, StopListening
from headgate.signals.outgoing import TooManySignals
from headgate.signals.service import Signal, SignalService, SignalVersion

__all__ = ["Signal", "SignalService", "SignalVersion", "SignalWatcher", "StopListening", "TooManySignals"]
