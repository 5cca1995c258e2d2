"""What the operator of a task decides about signals: load its DAG file, and call its ``on_signal`` for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from headgate.child.error_text import describe_error
from headgate.protocol.messages.queries import StartSignal
from headgate.protocol.messages.rules import Action
from headgate.protocol.messages.steps import StepFailed, StepNotBegun
from headgate.protocol.messages.worker import DecideSignals, SignalsDecided
from headgate.signals.rules import decide
from headgate.signals.versions import SignalVersion, value_of
from headgate.worker.steps import find_task
from headgate.worker.stops import StepStopped

# Then what is decided is handed over, and the rest asked again: the limit of a decision is not that of all its signals.
LONG_S: Final = 5.0


def run(asked: DecideSignals, *, on_decided: Callable[[Action], None]) -> SignalsDecided:
    """Decide about signals; return the last message of the answer.

    ``on_decided`` is called with each decision, outside of users' code. Raises `StepStopped`, and what that raises.
    """
    begun_at = time.monotonic()
    operator = find_task(asked.file, asked.dag_id, asked.task_id)
    if isinstance(operator, StepNotBegun):
        return SignalsDecided(asked.token, error=operator.reason, is_unloaded=True)
    if isinstance(operator, StepFailed):
        return SignalsDecided(asked.token, error=operator.error, traceback=operator.traceback, is_unloaded=True)
    for signal in asked.signals:
        try:
            action: Action = decide(operator, _version(signal)).value
        except StepStopped:
            raise
        except BaseException as error:  # also SystemExit, and an interrupt that the author's code raises
            text, trace = describe_error(error)
            return SignalsDecided(asked.token, error=text, traceback=trace)
        on_decided(action)
        if time.monotonic() - begun_at >= LONG_S:
            break
    return SignalsDecided(asked.token)


def _version(signal: StartSignal) -> SignalVersion:
    return SignalVersion(signal.key, value_of(signal.value), version=signal.version, namespace=signal.namespace)
