"""Signals: values that are sent under keys, each with the next version of its key; the parts of messages, and limits.

A key belongs to a namespace. Its versions are 1, 2, 3 and so on, in the order in which they were committed (I25). A
signal may be for one run alone: then it takes a version of its key as any other, and no other run considers it.
"""

from __future__ import annotations

import unicodedata
from typing import Final, Literal, TypeAlias

from headgate.protocol.messages import WireStruct

SIGNAL_KEY_CHARS_MAX: Final = 512  # with its namespace 2,448 bytes of UTF-8 at most, which fits an index row
NAMESPACE_CHARS_MAX: Final = 100  # for the same reason
DEDUP_CHARS_MAX: Final = 512  # as the key of an event
SIGNAL_BYTES_MAX: Final = 48 * 1024  # one encoded value, as of an XCom; larger ones belong in a file
SENDS_MAX: Final = 1000  # signals of one call, or of one step: they are sent in one transaction
SENDS_BYTES_MAX: Final = 1024 * 1024  # of their values, if a child sends them: they fit a frame with all else
VERSIONS_KEPT_MAX: Final = 10_000  # of one key, the newest
KEYS_MAX: Final = 1_000_000  # a key for each user, but not one for each event
SIGNALS_PER_PAGE_MAX: Final = 1000
LISTEN_S_MAX: Final = 10.0  # that a task waits for an answer while it listens; then it asks again
VERSION_MAX: Final = 2**63 - 1  # as much as a column holds

DEFAULT_NAMESPACE: Final = "default"
SIGNAL_TRIGGER: Final = "headgate.signals"  # the classpath of a wait for a signal, which no runner runs
AUTOMATIC: Final = "auto:"  # how a dedup begins that the sender has not given

Since: TypeAlias = Literal["run", "latest", "last_run"]
Comparison: TypeAlias = Literal["equal", "one_of", "at_least", "at_most", "above", "below", "starts_with"]

# Text that databases refuse, or that breaks the line or the terminal that it is shown on.
_UNFIT_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})


class SignalSend(WireStruct, frozen=True):
    """A signal to be sent; part of `SendSignals` and of outcomes. ``value`` is encoded.

    A second one of the same key with the same ``dedup`` is not sent. ``is_of_run``: it is for the sender's run alone.
    """

    key: str
    value: bytes
    dedup: str
    namespace: str = DEFAULT_NAMESPACE
    is_of_run: bool = False


class SentSignal(WireStruct, frozen=True):
    """The version of a signal that was sent; ``is_new`` is False if one with its dedup was sent before."""

    version: int
    is_new: bool


class StoredSignal(WireStruct, frozen=True):
    """One version of a key, as stored; part of `SignalPage`. ``value`` is encoded; ``sender`` is text for people.

    ``is_of_run``: it is for the run of whoever asks alone.
    """

    version: int
    value: bytes
    sender: str
    sent_at_s: float
    is_of_run: bool = False


class Predicate(WireStruct, frozen=True):
    """What the value of a signal has to be; ``operand`` is encoded. ``path``: keys of dicts, to a part of the value."""

    test: Comparison
    operand: bytes
    path: tuple[str, ...] = ()


class SignalWait(WireStruct, frozen=True):
    """The wait of a task for a signal, in the database alone; part of `StartTrigger`.

    It ends with the first version that was sent since the run was created (``since`` "run"), or the newest one before
    that ("latest"), and that has the encoded ``value``, or meets the ``predicate``; without both: any value.
    """

    key: str
    namespace: str = DEFAULT_NAMESPACE
    value: bytes | None = None
    since: Since = "run"
    predicate: Predicate | None = None


def text_problem(text: str, chars_max: int) -> str | None:
    """Return the problem with a key, a namespace or a dedup, or None."""
    if not 0 < len(text) <= chars_max:
        return f"{text[:60]!a} must have 1..{chars_max} characters, not {len(text):,}"
    for character in text:
        if unicodedata.category(character) in _UNFIT_CATEGORIES:
            return f"{text[:60]!a} must not contain {character!a}"
    return None


def address_problem(key: str, namespace: str) -> str | None:
    """Return the problem with the key of a signal and its namespace, or None."""
    if (problem := text_problem(key, SIGNAL_KEY_CHARS_MAX)) is not None:
        return f"the key of a signal {problem}"
    if (problem := text_problem(namespace, NAMESPACE_CHARS_MAX)) is not None:
        return f"the namespace {problem}"
    return None


def version_problem(name: str, number: int) -> str | None:
    """Return the problem with the number of a version, or with 0, which is before the first; or None."""
    if 0 <= number <= VERSION_MAX:
        return None
    return f"{name} must be a version, from 0 to {VERSION_MAX:,}, not {number:,}"


def signal_problem(signal: SignalSend) -> str | None:
    """Return the problem with a signal that is to be sent, or None."""
    if (problem := address_problem(signal.key, signal.namespace)) is not None:
        return problem
    if (problem := text_problem(signal.dedup, DEDUP_CHARS_MAX)) is not None:
        return f"the dedup of the signal {signal.key!a:.60} {problem}"
    if len(signal.value) > SIGNAL_BYTES_MAX:
        needed = f"{len(signal.value):,} bytes; the limit is {SIGNAL_BYTES_MAX:,}"
        return f"the value of the signal {signal.key!a:.60} needs {needed}"
    return None


def wait_problem(wait: SignalWait) -> str | None:
    """Return the problem with the wait for a signal, or None."""
    if (problem := address_problem(wait.key, wait.namespace)) is not None:
        return problem
    if wait.since == "last_run":
        return 'since="last_run" is for rules: a sensor has no place at which the run before stood'
    if wait.value is not None and len(wait.value) > SIGNAL_BYTES_MAX:
        return f"the value that is waited for needs {len(wait.value):,} bytes; the limit is {SIGNAL_BYTES_MAX:,}"
    return None
