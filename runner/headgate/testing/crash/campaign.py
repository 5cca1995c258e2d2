"""`crash_test`: run an author's trigger or producer on a real supervisor and runner, and kill these again and again.

While messages are published, the runner and the supervisor are killed with SIGKILL, at random moments and at marks.
After each death everything is read from outside: the broker through the author's `Broker`, the journal of the producer,
and the database through ``headgate events list``. The checker (`headgate.testing.crash.history`) compares the three.
"""

from __future__ import annotations

import inspect
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.testing.crash import history
from headgate.testing.crash.brokers import Broker
from headgate.testing.crash.deaths import Death, plan_deaths
from headgate.testing.crash.journal import (
    MESSAGE,
    Failing,
    JournaledTrigger,
    JournalReader,
    ProducerTrigger,
    is_journaled,
    message_in,
    subject_of,
)
from headgate.testing.crash.killing import MarkedDeaths
from headgate.testing.crash.pair import Pair, folder_of
from headgate.testing.crash.report import CrashReport, CrashTestFailed
from headgate.triggers.base import BaseTrigger
from headgate.triggers.shared_stream import SharedStreamProducer

KILLS = 8
MESSAGES = 400
MESSAGES_MAX = 1_000_000  # a name has six digits
CHUNKS_A_WINDOW = 30  # the messages between two deaths are published in this many pieces ...
CHUNK_PAUSE_S = 0.015  # ... and with this pause between them, so that a death meets some in flight
MARK_WAIT_S = 10.0  # a mark that is not reached within this time, while messages flow, is not reached at all
# Once the last runner is ready: if nothing was stored or forgotten for so long, nothing more will be. On a slow machine
# it is so many times as long as a runner, or messages, took to come again.
SETTLED_AFTER_S = 15.0
SETTLED_RECOVERIES = 4
FAILURES_MAX = 10  # of a trigger before its first message: it is given up, and its error told
RETRY_WAIT_S = 0.1  # of a trigger whose filter failed, so that most of the time messages flow
REST_INTERVAL_S = 0.1  # between two checks whether all messages are stored and acknowledged

# The values of `pytest --headgate-kills` and `--headgate-seed`, which override the arguments of the tests.
overrides: dict[str, int] = {}
# Of all crash tests that this process has completed, for the summary of the plugin.
reports: list[CrashReport] = []


def crash_test(
    trigger: BaseTrigger | type[SharedStreamProducer],
    broker: Broker,
    *,
    kwargs: Mapping[str, Any] | None = None,
    messages: int = MESSAGES,
    kills: int = KILLS,
    subscribers: int = 1,
    events_per_message: int | Callable[[str], int] = 1,
    settings: Mapping[str, str] | None = None,
    seed: int | None = None,
    folder: Path | None = None,
    kill_broker: Callable[[], object] | None = None,
    on_kill: Callable[[str], object] | None = None,
    open_pair: Callable[..., Pair] = Pair,
) -> CrashReport:
    """Kill the real pair ``kills`` times while it runs the trigger; raise unless nothing was lost or stored twice::

        # test_inbox.py
        from folder import Folder
        from inbox import Inbox

        from headgate.testing import crash_test


        def test_nothing_is_lost(tmp_path):
            folder = tmp_path / "inbox"
            crash_test(Inbox, Folder(folder), kwargs={"folder": str(folder)})

    ``trigger`` is an event trigger, or the class of a producer, made with ``kwargs``. It must be importable by its
    classpath, and fire ``events_per_message`` events for each message that ``broker`` publishes, each with the name of
    the message in its payload. If messages differ, or a filter skips some, ``events_per_message`` is a function of the
    name of the message, for example ``lambda message: int(message[-6:]) % 3``. Some messages fail once, and a producer
    has to deliver these again: a filter raises on one before and on one after its events, and for one message between
    two kills the producer is told that it failed. ``settings`` are headgate's, by name. ``seed`` determines
    the plan of the kills; the same seed gives the same plan, but the exact instants differ from run to run. ``folder``
    will hold the database, the log and the history; by default it is a temporary one, removed if the test passes.
    With ``kill_broker`` every third kill is of the broker: it is called to kill the broker and start it again, while
    nothing is published. ``on_kill`` is called with each kill in words, after the look that follows it. ``open_pair``
    makes the pair, with the arguments of `Pair`: a subclass may read the events in another way.

    Raises `CrashTestFailed` (an AssertionError) with the story of each finding, and `PairFailed` if the supervisor or
    the runner does not work at all.
    """
    trigger, import_path = _instance(trigger, kwargs)
    if not 1 <= messages <= MESSAGES_MAX:
        raise ValueError(f"messages must be in 1..{MESSAGES_MAX:,}, not {messages!r}")
    wanted = _wanted(events_per_message, [_NAME.format(number) for number in range(messages)])
    kills = overrides.get("kills", kills)
    seed = overrides.get("seed", secrets.randbelow(2**32) if seed is None else seed)
    place = folder or Path(tempfile.mkdtemp(prefix="headgate-crash-"))
    pair = open_pair(
        place / "pair",
        import_paths=[import_path],
        python_path=[place / "deaths"],
        settings={"retry_wait_s": str(RETRY_WAIT_S), **(settings or {})},
    )
    with pair:
        trial = _Trial(pair, trigger, broker, MarkedDeaths(place / "deaths"), place, wanted, kill_broker)
        plan = plan_deaths(kills, trigger, seed, has_broker=kill_broker is not None)
        trial.subscribe(subscribers, _plan_failures(messages, len(plan) + 1))
        report = trial.run(messages, plan, seed, on_kill or (lambda _: None))
    reports.append(report)
    if report.faults():
        raise CrashTestFailed(report)
    if folder is None:
        shutil.rmtree(place)
    return report


_NAME = "message-{:06d}"


def _plan_failures(messages: int, windows: int) -> Failing:
    """Return the messages that fail; a window lies between two deaths, or before the first or after the last.

    In each window one outcome fails, also after the last death, when nothing starts the producer again: therefore the
    filters, whose failure may do so, fail on earlier messages.
    """
    size = messages // windows
    last = (windows - 1) * size
    return Failing(
        before=[_NAME.format(size // 4)],
        after=[_NAME.format(last + 3 * size // 8)],
        outcome=[_NAME.format(number * size + size // 2) for number in range(windows)],
    )


def _instance(
    trigger: BaseTrigger | type[SharedStreamProducer], kwargs: Mapping[str, Any] | None
) -> tuple[BaseTrigger, str]:
    """Return the trigger, or one for the producer, and the folder that it is imported from.

    Raises `TypeError` for kwargs that the producer does not take.
    """
    if isinstance(trigger, type):
        assert issubclass(trigger, SharedStreamProducer), "give a trigger, or the class of a producer"
        inspect.signature(trigger).bind(**(kwargs or {}))
        classpath = f"{trigger.__module__}.{trigger.__qualname__}"
        return ProducerTrigger(classpath, dict(kwargs or {})), folder_of(trigger)
    assert kwargs is None, "kwargs are for the class of a producer; a trigger has its own"
    return trigger, folder_of(type(trigger))


def _wanted(events_per_message: int | Callable[[str], int], names: Sequence[str]) -> dict[str, int]:
    """Return the number of events expected for each message. Raises `ValueError` if it is not a valid number."""
    wanted = {name: events_per_message(name) if callable(events_per_message) else events_per_message for name in names}
    for name, count in wanted.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"events_per_message is {count!r} for {name}, and must be 0 or more")
    if not any(wanted.values()):
        raise ValueError("with no event for any message nothing can be lost: events_per_message is 0 for all")
    return wanted


class _Trial:
    """One crash test that is running."""

    def __init__(
        self,
        pair: Pair,
        trigger: BaseTrigger,
        broker: Broker,
        deaths: MarkedDeaths,
        place: Path,
        wanted: Mapping[str, int],
        kill_broker: Callable[[], object] | None,
    ) -> None:
        self._kill_broker = kill_broker
        self._publishing = threading.Lock()  # held while something is published, and while the broker is away
        self._pair = pair
        self._trigger = trigger
        self._broker = broker
        self._deaths = deaths
        self._history_path = place / "history.jsonl"
        self._wanted = wanted  # events, by message
        self._has_journal = is_journaled(trigger)
        self._journal_folder = place / "journal"
        self._journal_folder.mkdir(parents=True)
        self._journal = JournalReader(self._journal_folder, history.decode_lines)
        self._unread: list[history.Record] = []  # records of the journal that were read between two looks
        self._checker = history.Checker()
        self._subscribers: list[str] = []
        self._begun: list[str] = []  # messages whose publication has begun, in order
        self._published: set[str] = set()
        self._recorded = 0  # how many of ``_begun`` are in the history
        self._forgotten: set[str] = set()
        self._pending: set[str] = set()
        self._rows_seen: set[int] = set()
        self._copies: Counter[tuple[str, str]] = Counter()
        self._refused: set[str] = set()  # messages that a subscriber rejected: they need not be stored
        self._strange_rows = 0
        self._publishing_failed: BaseException | None = None
        self._recovery_s = 0.0  # the longest that messages, or the last runner, took to come after a start or a kill
        self._gone_at, self._ready_before = 0.0, 0  # when the last runner went, and how many had been ready until then
        self._done: list[tuple[Death, bool]] = []  # and whether the process died at the mark that was planned

    def subscribe(self, count: int, failing: Failing) -> None:
        """Add the watchers; messages fail as ``failing`` says."""
        trigger = self._trigger
        if self._has_journal:
            classpath, kwargs = trigger.serialize()
            trigger = JournaledTrigger(classpath, kwargs, str(self._journal_folder), failing)
        for number in range(count):
            name = f"subscriber-{number}"
            self._pair.add(trigger, name)
            self._subscribers.append(name)
            self._record([history.Subscribed(name)])

    def run(self, messages: int, plan: Sequence[Death], seed: int, on_kill: Callable[[str], object]) -> CrashReport:
        """Publish, kill, look; wait until nothing changes any more; return the report."""
        begun_at = self._gone_at = time.monotonic()
        names = [_NAME.format(number) for number in range(messages)]
        share = len(names) // (len(plan) + 1)
        self._pair.start()
        for number, death in enumerate(plan):
            self._window(names[number * share : (number + 1) * share], death)
            on_kill(str(death))
        self._publish(names[len(plan) * share :])
        self._check_publisher()
        self._come_to_rest()
        exit_code = self._pair.stop()
        self._look("the pair has left", at_rest=True)
        return CrashReport(
            subject=subject_of(self._trigger),
            checked=self._checker.report(),
            deaths=tuple((str(death), reached) for death, reached in self._done),
            subscribers=len(self._subscribers),
            has_producer=self._has_journal,
            pending=len(self._pending),
            strange_rows=self._strange_rows,
            incomplete=self._incomplete(),
            unwanted=sum(count for (_, name), count in self._copies.items() if not self._wanted[name]),
            dead_letters=self._pair.dead_letters(),
            last_error=self._pair.last_error(),
            exit_code=exit_code,
            seed=seed,
            seconds=time.monotonic() - begun_at,
            history_path=str(self._history_path),
        )

    def _incomplete(self) -> int:
        """Return how many messages gave a subscriber some of their events, not all. If it has none, they are lost."""
        return sum(
            0 < count < self._wanted[name] and name not in self._refused for (_, name), count in self._copies.items()
        )

    # --- publishing and killing -------------------------------------------------------------------

    def _publish(self, names: Sequence[str]) -> None:
        """Publish with pauses, in a separate thread, while processes are killed."""
        chunk = max(1, len(names) // CHUNKS_A_WINDOW)
        pause = threading.Event()
        try:
            for start in range(0, len(names), chunk):
                part = list(names[start : start + chunk])
                self._begun += part
                with self._publishing:
                    self._broker.publish(part)
                self._published.update(part)
                pause.wait(CHUNK_PAUSE_S)
        except BaseException as error:
            self._publishing_failed = error

    def _check_publisher(self) -> None:
        if self._publishing_failed is not None:
            raise AssertionError("the broker's publish() failed") from self._publishing_failed

    def _window(self, names: Sequence[str], death: Death) -> None:
        """Publish some messages, and kill a process while they are in flight.

        The second half is published only after the death was asked for, because the first half may all be stored by
        then.
        """
        middle, is_set_up = (len(names) + 1) // 2, threading.Event()

        def publish() -> None:
            self._publish(names[:middle])
            is_set_up.wait()
            self._publish(names[middle:])

        publisher = threading.Thread(target=publish, name="headgate crash test publisher")
        publisher.start()
        try:
            if names:
                looked_at = time.monotonic()
                self._wait_flow()
                self._recovery_s = max(self._recovery_s, time.monotonic() - looked_at)
            runners = self._pair.runners()
            self._done.append((death, self._kill(death, is_set_up)))
        finally:
            is_set_up.set()
            publisher.join()
        self._check_publisher()
        if death.victim == "supervisor":
            # Both are dead, so nothing changes during the look.
            self._pair.wait_dead(runners)
            self._look(str(death))
            self._pair.start()
        else:
            self._look(str(death))

    def _kill(self, death: Death, is_set_up: threading.Event) -> bool:
        """Kill a process; return False if it was to die at a mark and did not reach it. Set ``is_set_up`` before."""
        pair, mark = self._pair, death.mark
        if death.victim != "broker":
            self._gone_at, self._ready_before = time.monotonic(), pair.ready_count()
        if mark is not None:
            self._deaths.ask(mark)
            is_set_up.set()
            deadline, pause = time.monotonic() + MARK_WAIT_S, threading.Event()
            while not self._deaths.has_died(mark) and time.monotonic() < deadline:
                pause.wait(CHUNK_PAUSE_S)
            if not self._deaths.take_back(mark):
                return True
        else:
            is_set_up.set()
            threading.Event().wait(death.delay_s)
        if death.victim == "runner":
            pair.kill_runner()
        elif death.victim == "supervisor":
            pair.kill_supervisor()
        else:
            assert self._kill_broker is not None
            with self._publishing:
                self._kill_broker()
        return mark is None

    def _wait_flow(self) -> None:
        """Wait until messages flow: since the last look one was handed out or, without a journal, stored."""
        flows = self._is_handed_out if self._has_journal else self._is_stored

        def comes() -> bool:
            if flows():
                return True
            if not self._done and self._pair.failure_count() >= FAILURES_MAX:
                raise self._pair.failure(f"the trigger fails from the beginning on: {self._pair.last_error()}")
            return False

        self._pair.wait_until(comes, f"a message is {'handed out' if self._has_journal else 'stored'}")

    def _is_handed_out(self) -> bool:
        self._check_publisher()
        new = self._journal.read()
        self._unread += new
        return any(isinstance(record, history.HandedOut) for record in new)

    def _is_stored(self) -> bool:
        return len(self._pair.events()) > len(self._rows_seen)

    def _wait_last_runner(self) -> None:
        """Wait until the runner that follows the last kill is ready, if the log says so and one comes at all."""
        pair, pause = self._pair, threading.Event()
        while pair.tells_ready and pair.is_running and pair.ready_count() <= self._ready_before:
            self._recovery_s = max(self._recovery_s, time.monotonic() - self._gone_at)
            if self._recovery_s > pair.within_s:
                return
            pause.wait(REST_INTERVAL_S)

    def _come_to_rest(self) -> None:
        """Look until everything is stored and forgotten, or nothing changes any more."""
        expected = sum(self._wanted[name] for name in self._begun) * len(self._subscribers)
        self._wait_last_runner()
        changed_at, seen = time.monotonic(), (-1, -1)
        settled_after_s = max(SETTLED_AFTER_S, SETTLED_RECOVERIES * self._recovery_s)
        pause = threading.Event()
        while time.monotonic() - changed_at < settled_after_s:
            self._look("coming to rest")
            if len(self._rows_seen) >= expected and not (self._has_journal and self._pending):
                return
            if seen != (seen := (len(self._rows_seen), len(self._pending))):
                changed_at = time.monotonic()
            pause.wait(REST_INTERVAL_S)

    # --- looking ----------------------------------------------------------------------------------

    def _look(self, at: str, *, at_rest: bool = False) -> None:
        """Read broker, journal and database, in this order: a forgotten message must be stored by then."""
        published = set(self._published)
        self._pending = {name for text in self._broker.pending() for name in MESSAGE.findall(text)}
        journal, self._unread = self._unread + self._journal.read(), []
        rows = [row for row in self._pair.events() if row["id"] not in self._rows_seen]
        begun = self._begun[self._recorded :]
        self._record(
            # No subscriber has to store an event of a message that gives none.
            [
                history.Published(name, "published", int(name[-6:]), None if self._wanted[name] else ())
                for name in begun
            ],
        )
        self._recorded += len(begun)
        if self._has_journal:
            forgotten = published - self._pending - self._forgotten
            self._forgotten |= forgotten
            self._record([history.Forgotten(name, at) for name in sorted(forgotten)])
        self._record(journal)
        advanced = [item for record in journal if isinstance(record, history.Advanced) for item in record.items]
        self._refused |= {item.event for item in advanced if item.rejected}
        self._record([record for row in rows if (record := self._stored(row, at)) is not None])
        self._record([history.Looked(at, at_rest=at_rest)])

    def _stored(self, row: Mapping[str, Any], at: str) -> history.Stored | None:
        self._rows_seen.add(row["id"])
        message = message_in(row["payload"])
        if message is None:
            self._strange_rows += 1
            return None
        if message not in self._wanted:
            self._strange_rows += 1
            return None
        copy = self._copies[row["watcher"], message]
        self._copies[row["watcher"], message] += 1
        # Events beyond the expected number are duplicates; of which event is unknown.
        return history.Stored(message, row["watcher"], str(row["id"]), copy % max(1, self._wanted[message]), at)

    def _record(self, records: Sequence[history.Record]) -> None:
        self._checker.extend(records)
        with self._history_path.open("ab") as file:
            file.writelines(map(history.encode, records))
