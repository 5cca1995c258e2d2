"""Checks, for commands, of a trigger and of its broker: in a child process, which has users' code and the clients."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from headgate.protocol.messages.checks import (
    CHECK_ANSWER_BYTES_MAX,
    BrokerChecked,
    Check,
    CheckBroker,
    CheckTrigger,
    OtherTrigger,
    TriggerChecked,
)
from headgate.supervisor.children.isolation import RunAs
from headgate.supervisor.children.process import READ_BYTES_MAX, ChildProcess

CHECK_TIMEOUT_S = 30.0  # imports of large libraries from a slow disk take seconds


def check_trigger(
    classpath: str,
    kwargs: bytes,
    *,
    import_paths: Sequence[str],
    environment: Mapping[str, str],
    run_as: RunAs | None = None,
    others: Sequence[OtherTrigger] = (),
    timeout_s: float = CHECK_TIMEOUT_S,
) -> TriggerChecked:
    """Say whether the trigger can be constructed, or why not, within ``timeout_s``. Raises `OSError`.

    ``kwargs`` are encoded, ``environment`` is that of the child. A child that dies, or that takes too long, is a
    problem of the class. ``others`` may read the same stream: which of them would open it otherwise is noted.
    """
    question = CheckTrigger(classpath, kwargs, tuple(import_paths), tuple(others))
    answer, how = _answer_to(question, environment, run_as, timeout_s)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(answer, type=TriggerChecked)
    if not how:
        return TriggerChecked(f"loading {classpath} takes longer than {timeout_s:g} s")
    return TriggerChecked(f"the process that loads {classpath} ended: {how}")


def check_broker(
    classpath: str,
    kwargs: bytes,
    *,
    connection: str,
    environment: Mapping[str, str],
    run_as: RunAs | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> BrokerChecked:
    """Say whether a trigger of a broker can read it by the URI ``connection``, within ``timeout_s``. Raises `OSError`.

    ``kwargs`` are encoded, ``environment`` is that of the child.
    """
    answer, how = _answer_to(CheckBroker(classpath, kwargs, connection), environment, run_as, timeout_s)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(answer, type=BrokerChecked)
    if not how:
        return BrokerChecked(problem=f"there is no answer within {timeout_s:g} s")
    return BrokerChecked(problem=f"the process that checks it ended: {how}")


def _answer_to(
    question: Check, environment: Mapping[str, str], run_as: RunAs | None, timeout_s: float
) -> tuple[bytes, str]:
    """Return the bytes of the answer, and how the child ended; "" if it took too long."""
    child = ChildProcess("headgate.runner.checking", (), environment, run_as=run_as)
    deadline = time.monotonic() + timeout_s
    try:
        answer = _ask(child, msgspec.msgpack.encode(question), deadline)
    finally:
        is_late = not child.has_died() and time.monotonic() >= deadline
        child.kill(f"it took longer than {timeout_s:g} s" if is_late else "")
        how = child.reap()
        child.close()
    return answer, "" if is_late else str(how)


def _ask(child: ChildProcess, question: bytes, deadline: float) -> bytes:
    """Send the question; return all of the answer that arrives in time. What the author's code prints is read, too."""
    answer, left = b"", memoryview(question)
    child.frames.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.frames, selectors.EVENT_READ | selectors.EVENT_WRITE)
        selector.register(child.output, selectors.EVENT_READ)
        while (wait_s := deadline - time.monotonic()) > 0 and len(answer) <= CHECK_ANSWER_BYTES_MAX:
            for key, events in selector.select(wait_s):
                if key.fileobj is child.output:
                    for line in child.output.read():
                        child.note_output(line)
                    if child.output.is_ended:
                        selector.unregister(child.output)
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        left = left[child.frames.send(left) :]
                        if not left:
                            child.frames.shutdown(socket.SHUT_WR)  # the child reads to the end
                            selector.modify(child.frames, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ:
                        part = child.frames.recv(READ_BYTES_MAX)
                        if not part:
                            return answer
                        answer += part
                except BlockingIOError:
                    continue
                except OSError:  # it has died
                    return answer
    return answer
