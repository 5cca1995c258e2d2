"""Listening in a task: the versions of a key as they are sent, one by one or in a watcher, with a supervisor's answers.

The supervisor here answers from a list; the test of the real one is `tests.supervisor.tasks.test_listeners`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from headgate.child import queries
from headgate.child.queries import NoQueryHandler, QueryFailed
from headgate.protocol.messages.queries import ListenSignals, Query, QueryResult, RunCreated, SignalsHeard
from headgate.protocol.messages.signals import LISTEN_S_MAX, StoredSignal
from headgate.protocol.values import encode_value
from headgate.signals import SignalService, SignalVersion, SignalWatcher, StopListening, listening
from headgate.tasks import DAG, task
from headgate.testing import run_task


def heard(*versions: int, seen: int | None = None) -> SignalsHeard:
    signals = tuple(StoredSignal(number, encode_value(number * 10, where="v"), "a task", 0.0) for number in versions)
    return SignalsHeard(signals, versions[-1] if seen is None else seen)


def nothing(seen: int) -> SignalsHeard:
    return heard(seen=seen)


class Supervisor:
    """Answers with what a test says; each answer takes as long as it was asked to wait, unless it has signals."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked: list[ListenSignals] = []
        self.answers: list[QueryResult] = []

    def monotonic(self) -> float:
        return self.now

    def answer(self, query: Query) -> QueryResult:
        assert isinstance(query, ListenSignals)
        self.asked.append(query)
        answer = self.answers.pop(0)
        if query.after is not None and isinstance(answer, SignalsHeard) and not answer.signals:
            self.now += query.within_s
        return answer

    @property
    def places(self) -> list[int | None]:
        return [query.after for query in self.asked]

    @property
    def waits(self) -> list[float]:
        return [query.within_s for query in self.asked if query.after is not None]


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    supervisor = Supervisor()
    monkeypatch.setattr(listening, "time", supervisor)
    with queries.queries_handled_by(supervisor.answer):
        yield supervisor


def values(signals: Any) -> list[Any]:
    return [one.value for one in signals]


def test_a_listener_gets_what_is_there_and_then_what_comes(supervisor: Supervisor) -> None:
    supervisor.answers = [heard(5, 6), nothing(7), heard(8)]
    signals = SignalService("n").listen_signal("me", "labels", after=4)
    assert supervisor.asked == []
    first = next(signals)
    assert (first.key, first.value, first.version, first.sender) == ("labels", 50, 5, "a task")
    assert values([next(signals), next(signals)]) == [60, 80]
    # It goes on behind what it has seen, which another run alone may have got.
    assert supervisor.asked == [ListenSignals("labels", "n", place, LISTEN_S_MAX) for place in (4, 6, 7)]


def test_without_a_place_it_begins_with_the_next_one_after_the_call(supervisor: Supervisor) -> None:
    supervisor.answers = [nothing(3), heard(4)]
    signals = SignalService().listen_signal("me", "labels")
    assert supervisor.places == [None], "the place is taken by the call"
    assert next(signals).version == 4
    assert supervisor.places == [None, 3]


@pytest.mark.parametrize("timeout", [25, 25.0, timedelta(seconds=25)])
def test_it_ends_after_so_much_time_without_a_new_one(supervisor: Supervisor, timeout: Any) -> None:
    supervisor.answers = [nothing(0), nothing(0), heard(1), *[nothing(1)] * 3]
    assert values(SignalService().listen_signal("me", "labels", after=0, timeout=timeout)) == [10]
    assert supervisor.answers == []
    assert supervisor.waits == [10.0, 10.0, 5.0, 10.0, 10.0, 5.0]


def test_the_time_in_which_the_task_is_busy_does_not_count(supervisor: Supervisor) -> None:
    supervisor.answers = [heard(1), heard(2), nothing(2)]
    found = []
    for signal in SignalService().listen_signal("me", "labels", after=0, timeout=5):
        found.append(signal.value)
        supervisor.now += 3600.0
    assert (found, supervisor.waits) == ([10, 20], [5.0, 5.0, 5.0])


def test_a_timeout_of_nothing_gives_what_there_is(supervisor: Supervisor) -> None:
    supervisor.answers = [heard(1), nothing(1)]
    assert values(SignalService().listen_signal("me", "labels", after=0, timeout=0)) == [10]
    assert supervisor.waits == [0.0, 0.0]


@pytest.mark.parametrize(("page", "found"), [(heard(7, 8), [70]), (heard(8), []), (nothing(9), [])])
def test_one_version_alone_is_waited_for(supervisor: Supervisor, page: SignalsHeard, found: list[int]) -> None:
    """If it is for another run alone, or is not kept any more, there is none."""
    supervisor.answers = [nothing(6), page]
    assert values(SignalService().listen_signal("me", "labels", version=7)) == found
    assert supervisor.places == [6, 6]


class Watcher(SignalWatcher):
    """Keeps what it gets, and does something about it."""

    def __init__(self, act: Callable[[Sequence[SignalVersion]], object] = lambda signals: None) -> None:
        self.got: list[list[int]] = []
        self.act = act

    def process(self, signals: Sequence[SignalVersion]) -> None:
        self.got.append([one.version for one in signals])
        self.act(signals)


def test_a_watcher_gets_all_that_there_are_at_once(supervisor: Supervisor) -> None:
    supervisor.answers = [nothing(4), heard(5, 6), nothing(6), heard(9), nothing(9), nothing(9)]
    watcher = Watcher()
    assert SignalService().listen_signal("me", "labels", watcher, timeout=15.0) is None
    assert watcher.got == [[5, 6], [9]]


def test_a_watcher_ends_the_listening(supervisor: Supervisor) -> None:
    def stop(signals: Sequence[SignalVersion]) -> None:
        if signals[-1].version >= 6:
            raise StopListening

    supervisor.answers = [heard(5), heard(6, 7)]
    watcher = Watcher(stop)
    SignalService().listen_signal("me", "labels", watcher, after=4)
    assert watcher.got == [[5], [6, 7]]


def test_a_watcher_that_fails_fails_who_listens(supervisor: Supervisor) -> None:
    def fail(signals: Sequence[SignalVersion]) -> None:
        raise KeyError("auc")

    supervisor.answers = [heard(5)]
    with pytest.raises(KeyError, match="auc"):
        SignalService().listen_signal("me", "labels", Watcher(fail), after=4)


def test_a_watcher_of_one_version_is_not_called_without_it(supervisor: Supervisor) -> None:
    supervisor.answers = [heard(5), heard(8)]
    first, second = Watcher(), Watcher()
    SignalService().listen_signal("me", "labels", first, 5)
    SignalService().listen_signal("me", "labels", second, 7)
    assert (first.got, second.got) == ([[5]], [])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "problem"),
    [
        (("",), {}, ValueError, "the key of a signal '' must have"),
        (("a", print), {}, TypeError, "the watcher must be a SignalWatcher, not builtin_function_or_method"),
        (("a", None, 0), {}, ValueError, "the version from 1 on"),
        (("a", None, 3), {"after": 2}, ValueError, "version is 3 and after is 2: give one of them"),
        (("a",), {"after": -1}, ValueError, "after must be a version, from 0 to "),
        (("a",), {"timeout": -0.5}, ValueError, "the timeout must be 0 seconds or more, not -0.5"),
        (("a",), {"timeout": float("nan")}, ValueError, "the timeout must be 0 seconds or more, not nan"),
    ],
)
def test_what_cannot_be_listened_for_is_refused_by_the_call(
    supervisor: Supervisor, arguments: Any, options: Any, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        SignalService().listen_signal("me", *arguments, **options)
    assert supervisor.asked == []


def test_what_the_supervisor_refuses_is_raised(supervisor: Supervisor) -> None:
    supervisor.answers = [RunCreated(True)]
    with pytest.raises(QueryFailed, match="answered with RunCreated"):
        SignalService().listen_signal("me", "labels")


def test_outside_of_a_step_nobody_listens() -> None:
    with pytest.raises(NoQueryHandler):
        SignalService().listen_signal("me", "labels")


# --- in an author's tests --------------------------------------------------------------------------


def test_run_task_tells_what_is_sent_and_the_listening_ends_after_that() -> None:
    @task
    def listen() -> Any:
        service = SignalService()
        service.send_signal("labels", "own")
        watcher = Watcher()
        service.listen_signal("me", "labels", watcher, after=1)
        from_now = values(service.listen_signal("me", "labels"))
        return from_now, values(service.listen_signal("me", "labels", version=2)), watcher.got

    with DAG("d"):
        listening_ = listen()
    result = run_task(listening_, signals={"labels": ["a", "b"]})
    assert result.value == (["a", "b", "own"], ["b"], [[2, 3]])
    assert run_task(listening_).value == (["own"], [], [])
