"""Tools to test triggers, producers and tasks; see ``docs/testing.md``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.testing.crash.brokers import Broker, FileLogBroker
    from headgate.testing.crash.campaign import crash_test
    from headgate.testing.crash.commands import PairFailed
    from headgate.testing.crash.dags import DagCrashReport, DagCrashTestFailed, crash_test_dag
    from headgate.testing.crash.pair import Pair
    from headgate.testing.crash.report import CrashReport, CrashTestFailed
    from headgate.testing.failures import (
        LeftBehind,
        LoopBlocked,
        Misbehaved,
        RoundTripFailed,
        TaskNeverEnds,
        TaskNotSuccessful,
        TooFewEvents,
        TriggerFailed,
    )
    from headgate.testing.running import run_trigger
    from headgate.testing.scripted import Message, SharedStream, shared_stream
    from headgate.testing.stubs import CreatedRun, run_on_signal
    from headgate.testing.tasks import Deferral, TaskResult, run_task

# Imported lazily, because pytest imports this package, for the plugin, in every project that has headgate.
_HOMES = {
    "Broker": "crash.brokers",
    "CrashReport": "crash.report",
    "CrashTestFailed": "crash.report",
    "CreatedRun": "stubs",
    "DagCrashReport": "crash.dags",
    "DagCrashTestFailed": "crash.dags",
    "Deferral": "tasks",
    "FileLogBroker": "crash.brokers",
    "LeftBehind": "failures",
    "LoopBlocked": "failures",
    "Message": "scripted",
    "Misbehaved": "failures",
    "Pair": "crash.pair",
    "PairFailed": "crash.commands",
    "RoundTripFailed": "failures",
    "SharedStream": "scripted",
    "TaskNeverEnds": "failures",
    "TaskNotSuccessful": "failures",
    "TaskResult": "tasks",
    "TooFewEvents": "failures",
    "TriggerFailed": "failures",
    "crash_test": "crash.campaign",
    "crash_test_dag": "crash.dags",
    "run_on_signal": "stubs",
    "run_task": "tasks",
    "run_trigger": "running",
    "shared_stream": "scripted",
}

__all__ = [
    "Broker",
    "CrashReport",
    "CrashTestFailed",
    "CreatedRun",
    "DagCrashReport",
    "DagCrashTestFailed",
    "Deferral",
    "FileLogBroker",
    "LeftBehind",
    "LoopBlocked",
    "Message",
    "Misbehaved",
    "Pair",
    "PairFailed",
    "RoundTripFailed",
    "SharedStream",
    "TaskNeverEnds",
    "TaskNotSuccessful",
    "TaskResult",
    "TooFewEvents",
    "TriggerFailed",
    "crash_test",
    "crash_test_dag",
    "run_on_signal",
    "run_task",
    "run_trigger",
    "shared_stream",
]


def __getattr__(name: str) -> Any:
    """Import a lazy name. Raises AttributeError."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
