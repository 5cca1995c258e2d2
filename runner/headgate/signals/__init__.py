"""Signals for authors: values under keys, which tasks and triggers send, and tasks list, hear, and start by."""

from headgate.protocol.messages.signals import Predicate
from headgate.signals.base import BaseSignalService
from headgate.signals.listening import Heard, SignalWatcher, StopListening
from headgate.signals.outgoing import TooManySignals
from headgate.signals.rules import (
    NECESSARY,
    NONE,
    RESTART,
    START,
    STOP,
    SUFFICIENT,
    Every,
    On,
    OnSignal,
    SignalAction,
    SignalCondition,
    SignalOperator,
    TaskEnded,
    above,
    at_least,
    at_most,
    below,
    equal,
    field,
    one_of,
    starts_with,
)
from headgate.signals.service import SignalService
from headgate.signals.versions import Signal, SignalVersion, UnreadableValue

__all__ = [
    "NECESSARY",
    "NONE",
    "RESTART",
    "START",
    "STOP",
    "SUFFICIENT",
    "BaseSignalService",
    "Every",
    "Heard",
    "On",
    "OnSignal",
    "Predicate",
    "Signal",
    "SignalAction",
    "SignalCondition",
    "SignalOperator",
    "SignalService",
    "SignalVersion",
    "SignalWatcher",
    "StopListening",
    "TaskEnded",
    "TooManySignals",
    "UnreadableValue",
    "above",
    "at_least",
    "at_most",
    "below",
    "equal",
    "field",
    "one_of",
    "starts_with",
]
