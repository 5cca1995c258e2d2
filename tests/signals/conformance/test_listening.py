"""Any implementation of signals hears them so: from a place on, in order, none left out and none twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tests.signals.conformance.rigs import Rig
from tests.waiting import WITHIN_S

from headgate.signals import BaseSignalService, Signal, SignalVersion, SignalWatcher, StopListening


class Collecting(SignalWatcher):
    """Keeps what it gets, until it has so many."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.batches: list[list[SignalVersion]] = []

    def process(self, signals: Sequence[SignalVersion]) -> None:
        self.batches.append(list(signals))
        if len(self.seen) >= self.count:
            raise StopListening

    @property
    def seen(self) -> list[int]:
        return [one.version for batch in self.batches for one in batch]


def versions(signals: Any) -> list[int]:
    return [one.version for one in signals]


def send(service: BaseSignalService, count: int, key: str = "a") -> None:
    service.send_signals([Signal(key, number) for number in range(count)])


@pytest.fixture
def others(rig: Rig) -> Iterator[ThreadPoolExecutor]:
    """Threads for those who send or listen beside the test."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_what_is_there_comes_in_order(service: BaseSignalService) -> None:
    send(service, 3)
    heard = list(service.listen_signal("me", "a", after=0, timeout=0))
    assert [(one.key, one.version, one.value) for one in heard] == [("a", 1, 0), ("a", 2, 1), ("a", 3, 2)]
    assert heard[0].sender
    assert heard[0].sent_at is not None


@pytest.mark.parametrize("after", [1, 3, 9])
def test_it_begins_above_a_place(service: BaseSignalService, after: int) -> None:
    send(service, 3)
    assert versions(service.listen_signal("me", "a", after=after, timeout=0)) == list(range(after + 1, 4))


def test_without_a_place_it_begins_with_the_first_after_the_call(service: BaseSignalService) -> None:
    send(service, 3)
    known, unknown = (service.listen_signal("me", key, timeout=0) for key in ("a", "b"))
    send(service, 2)
    send(service, 1, "b")
    assert (versions(known), versions(unknown)) == ([4, 5], [1])


def test_it_waits_for_those_to_come(rig: Rig, service: BaseSignalService, others: ThreadPoolExecutor) -> None:
    def listen() -> list[int]:
        with rig.open() as listener:
            signals = listener.listen_signal("me", "a", after=0, timeout=WITHIN_S)
            return [next(signals).version for _ in range(20)]

    heard = others.submit(listen)
    for _ in range(20):
        send(service, 1)
    assert heard.result(WITHIN_S) == list(range(1, 21))


def test_it_waits_for_a_key_that_nobody_has_sent_yet(
    rig: Rig, service: BaseSignalService, others: ThreadPoolExecutor
) -> None:
    def listen() -> int:
        with rig.open() as listener:
            return next(listener.listen_signal("me", "new", after=0)).version

    heard = others.submit(listen)
    send(service, 1, "other")
    send(service, 1, "new")
    assert heard.result(WITHIN_S) == 1


def test_it_hears_one_key_of_one_namespace(rig: Rig, service: BaseSignalService) -> None:
    with rig.open("other") as other:
        send(other, 3)
        send(service, 2, "b")
        send(service, 1)
        assert versions(service.listen_signal("me", "a", after=0, timeout=0)) == [1]
        assert versions(other.listen_signal("me", "a", after=0, timeout=0)) == [1, 2, 3]


def test_it_goes_on_over_many_pages(service: BaseSignalService) -> None:
    for _ in range(3):
        send(service, 800)
    assert versions(service.listen_signal("me", "a", after=0, timeout=0)) == list(range(1, 2401))


def test_large_values_come_whole(service: BaseSignalService) -> None:
    values = [f"{number:02}" + "x" * 45_000 for number in range(40)]
    for first in (0, 20):
        service.send_signals([Signal("a", value) for value in values[first : first + 20]])
    assert [one.value for one in service.listen_signal("me", "a", after=0, timeout=0)] == values


def test_one_version_is_heard_alone(service: BaseSignalService) -> None:
    send(service, 5)
    assert versions(service.listen_signal("me", "a", version=3)) == [3]


def test_one_version_is_waited_for(rig: Rig, service: BaseSignalService, others: ThreadPoolExecutor) -> None:
    def listen() -> list[int]:
        with rig.open() as listener:
            return versions(listener.listen_signal("me", "a", version=3))

    heard = others.submit(listen)
    for _ in range(3):
        send(service, 1)
    assert heard.result(WITHIN_S) == [3]


def test_versions_that_are_not_kept_are_passed_over(
    service: BaseSignalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.store.signals.sending.VERSIONS_KEPT_MAX", 2)
    send(service, 5)
    assert versions(service.listen_signal("me", "a", after=0, timeout=0)) == [4, 5]
    assert versions(service.listen_signal("me", "a", version=2)) == [], "its place is over"


@pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)])
def test_it_ends_after_so_much_time_without_a_new_one(service: BaseSignalService, timeout: Any) -> None:
    assert versions(service.listen_signal("me", "a", timeout=timeout)) == []
    send(service, 1)
    assert versions(service.listen_signal("me", "a", after=0, timeout=timeout)) == [1]


def test_what_is_sent_while_a_listener_is_busy_is_not_lost(service: BaseSignalService) -> None:
    send(service, 1)
    heard = []
    for signal in service.listen_signal("me", "a", after=0, timeout=0.01):
        heard.append(signal.version)
        if len(heard) < 4:
            send(service, 1)
    assert heard == [1, 2, 3, 4]


def test_a_watcher_gets_them_in_batches(service: BaseSignalService) -> None:
    send(service, 3)
    watcher = Collecting(3)
    assert service.listen_signal("me", "a", watcher, after=0) is None
    assert watcher.seen == [1, 2, 3]
    assert isinstance(watcher.batches[0][0], SignalVersion)


def test_a_watcher_is_called_until_it_wants_no_more(
    rig: Rig, service: BaseSignalService, others: ThreadPoolExecutor
) -> None:
    watcher = Collecting(5)

    def listen() -> None:
        with rig.open() as listener:
            listener.listen_signal("me", "a", watcher, after=0)

    heard = others.submit(listen)
    for _ in range(5):
        send(service, 1)
    heard.result(WITHIN_S)
    assert watcher.seen == [1, 2, 3, 4, 5]
    assert all(watcher.batches), "none is empty"


def test_a_watcher_is_left_at_the_timeout(service: BaseSignalService) -> None:
    watcher = Collecting(100)
    send(service, 2)
    assert service.listen_signal("me", "a", watcher, after=0, timeout=0.01) is None
    assert watcher.seen == [1, 2]


def test_an_exception_of_a_watcher_leaves_the_listening(service: BaseSignalService) -> None:
    class Failing(SignalWatcher):
        def process(self, signals: Sequence[SignalVersion]) -> None:
            raise KeyError(signals[0].version)

    send(service, 1)
    with pytest.raises(KeyError, match="1"):
        service.listen_signal("me", "a", Failing(), after=0)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"after": -1}, ValueError, "after must be a version, from 0 to "),
        ({"version": 0}, ValueError, "version is 0 and after is None: give one of them"),
        ({"version": 2, "after": 1}, ValueError, "version is 2 and after is 1: give one of them"),
        ({"timeout": -1.0}, ValueError, "the timeout must be 0 seconds or more, not -1"),
        ({"timeout": math.nan}, ValueError, "the timeout must be 0 seconds or more, not nan"),
        ({"watcher": print}, TypeError, "the watcher must be a SignalWatcher, not builtin_function_or_method"),
    ],
)
def test_what_cannot_be_listened_to_is_refused_by_the_call(
    service: BaseSignalService, options: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        service.listen_signal("me", "a", **options)
    with pytest.raises(ValueError, match="the key of a signal"):
        service.listen_signal("me", "")


def test_all_listeners_get_all(rig: Rig, service: BaseSignalService, others: ThreadPoolExecutor) -> None:
    def listen(after: int) -> list[int]:
        with rig.open() as listener:
            signals = listener.listen_signal("me", "a", after=after)
            return [next(signals).version for _ in range(10)]

    send(service, 5)
    heard = [others.submit(listen, number) for number in range(5)]
    for _ in range(10):
        send(service, 1)
    assert [one.result(WITHIN_S) for one in heard] == [list(range(n + 1, n + 11)) for n in range(5)]


def test_a_listener_that_is_left_is_gone_and_others_go_on(service: BaseSignalService) -> None:
    send(service, 2)
    for _ in range(30):
        left = service.listen_signal("me", "a", after=0)
        assert next(left).version == 1
        del left
    assert versions(service.listen_signal("me", "a", after=0, timeout=0)) == [1, 2]
