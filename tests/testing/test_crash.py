"""crash_test finds what is wrong with a producer, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest
from tests.waiting import WITHIN_S

from headgate.brokers.filelog import FileLogTrigger
from headgate.testing import CrashReport, CrashTestFailed, FileLogBroker, PairFailed, crash_test
from headgate.testing.crash import campaign as crash
from headgate.testing.crash.deaths import plan_deaths
from headgate.testing.crash.history import Report
from headgate.testing.crash.journal import ProducerTrigger, subject_of
from headgate.triggers.base import BaseTrigger
from headgate.triggers.file import FileTrigger

sys.path.append(str(Path(__file__).parent / "users"))

import faulty_inboxes

pytestmark = pytest.mark.campaign


class FolderBroker:
    """The files of a folder as a broker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def publish(self, messages: Sequence[str]) -> None:
        for message in messages:
            draft = self.folder / f"{message}.draft"
            draft.write_text(json.dumps(message))
            draft.rename(draft.with_suffix(".json"))

    def pending(self) -> list[str]:
        return [path.name for path in self.folder.glob("*.json")]


@pytest.fixture
def broker(tmp_path: Path) -> FolderBroker:
    return FolderBroker(tmp_path / "inbox")


@pytest.fixture(autouse=True)
def _of_these_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash, "reports", [])
    monkeypatch.setattr(crash, "overrides", {})
    # Where something is lost, nothing will ever come; a few looks without news are enough to know it.
    monkeypatch.setattr(crash, "SETTLED_AFTER_S", 3.0)


def seed_of(first_mark: str, trigger: BaseTrigger) -> int:
    """A seed whose first death is at this mark."""
    return next(seed for seed in count() if plan_deaths(1, trigger, seed)[0].mark == first_mark)


def crash_producer(producer: type[faulty_inboxes.Inbox], broker: FolderBroker, place: Path, mark: str) -> None:
    trigger = ProducerTrigger(f"faulty_inboxes.{producer.__name__}", {"folder": str(broker.folder)})
    crash_test(
        producer,
        broker,
        kwargs={"folder": str(broker.folder)},
        messages=60,
        kills=1,
        seed=seed_of(mark, trigger),
        folder=place,
    )


def test_kwargs_that_a_producer_does_not_take_are_refused_at_once(broker: FolderBroker, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="foldr'"):
        crash_test(faulty_inboxes.Inbox, broker, kwargs={"folder": "x", "foldr": "x"}, folder=tmp_path / "place")


def test_the_report_names_the_class_of_the_author() -> None:
    assert subject_of(ProducerTrigger("orders.Producer", {})) == "orders.Producer"
    assert subject_of(FileTrigger("a.csv")) == "headgate.triggers.file.FileTrigger"


def kinds(failed: CrashTestFailed) -> set[str]:
    return {finding.kind for finding in failed.report.checked.findings}


def test_a_log_of_files_survives_with_three_subscribers_whoever_dies(tmp_path: Path) -> None:
    report = crash_test(
        FileLogTrigger(tmp_path / "log", "g"),
        FileLogBroker(tmp_path / "log", "g"),
        messages=200,
        kills=2,
        subscribers=3,
        folder=tmp_path / "place",
    )
    assert report.faults() == []
    assert report.checked.stored == 600
    assert report.checked.advances > 0, "the journal was written"
    assert report.kills == 2
    assert all(reached for _, reached in report.deaths)


def test_nothing_is_said_to_be_lost_before_the_last_runner_has_had_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kills all is published before the first runner is there: a machine may be as slow as it likes."""
    monkeypatch.setattr(crash, "SETTLED_AFTER_S", 0.0)
    log = tmp_path / "log"
    report = crash_test(FileLogTrigger(log, "g"), FileLogBroker(log, "g"), messages=5, kills=0)
    assert report.checked.stored == 5


def test_a_producer_that_forgets_too_early_loses_events(broker: FolderBroker, tmp_path: Path) -> None:
    with pytest.raises(CrashTestFailed) as failed:
        crash_producer(faulty_inboxes.Forgetful, broker, tmp_path / "place", "host.event_bound")
    assert "lost" in kinds(failed.value)
    text = str(failed.value)
    assert "the broker forgot it" in text, "with its story"
    assert "handed out by reader" in text
    assert "runner, host.event_bound" in text, "with what was done"
    again = [sys.executable, "-m", "headgate.testing.crash.history", failed.value.report.history_path]
    read = subprocess.run(again, capture_output=True, text=True)
    assert read.returncode == 1, "the history that is kept shows it again"
    assert "lost" in read.stdout


def test_a_producer_without_event_keys_stores_twice(broker: FolderBroker, tmp_path: Path) -> None:
    with pytest.raises(CrashTestFailed) as failed:
        crash_producer(faulty_inboxes.Nameless, broker, tmp_path / "place", "group.before_advance")
    assert kinds(failed.value) == {"stored twice"}


def test_a_producer_that_forgets_what_failed_is_found_without_any_kill(broker: FolderBroker, tmp_path: Path) -> None:
    trigger = faulty_inboxes.FailsOnce(str(broker.folder), "message-000007")
    with pytest.raises(CrashTestFailed) as failed:
        crash_test(trigger, broker, messages=20, kills=0, subscribers=2, folder=tmp_path / "place")
    assert {"lost", "commit past a failed offset"} <= kinds(failed.value)
    # Those behind it may have been broadcast by then, and failed with it; those before it were stored.
    first = min(finding.event for finding in failed.value.report.checked.findings)
    assert first == "message-000005", "the filter of the crash test fails on it, before that of the trigger on 7"


@pytest.mark.parametrize(("kills", "subscribers"), [(0, 1), (1, 1), (0, 2)])
def test_a_producer_that_ignores_what_failed_is_found_with_the_message_that_it_forgot(
    broker: FolderBroker, tmp_path: Path, kills: int, subscribers: int
) -> None:
    with pytest.raises(CrashTestFailed, match="messages are never acknowledged at the broker") as failed:
        crash_test(
            faulty_inboxes.Deaf,
            broker,
            kwargs={"folder": str(broker.folder)},
            messages=40,
            kills=kills,
            subscribers=subscribers,
            folder=tmp_path / "place",
        )
    assert failed.value.report.pending >= 1, "the one after the last kill, at least"
    found = [f for f in failed.value.report.checked.findings if f.kind == "never handed out again"]
    assert {f"{finding.event}.json" for finding in found} <= set(broker.pending())
    text = str(failed.value)
    assert f"never handed out again: {found[0].event}\n" in text
    assert "failed 1" in text, "with its story"
    assert "it failed, and reader" in text


@pytest.mark.parametrize("subscribers", [1, 2])
def test_filters_fail_before_and_after_their_events_and_a_good_producer_delivers_both_again(
    broker: FolderBroker, tmp_path: Path, subscribers: int
) -> None:
    report = crash_test(
        faulty_inboxes.Inbox,
        broker,
        kwargs={"folder": str(broker.folder)},
        messages=40,
        kills=0,
        subscribers=subscribers,
        folder=tmp_path / "place",
    )
    assert report.checked.stored == 40 * subscribers
    log = (tmp_path / "place" / "pair" / "supervisor.log").read_text()
    assert "FilterFailed: message-000010, before its events" in log
    assert "FilterFailed: message-000015, after its events" in log
    story = (tmp_path / "place" / "history.jsonl").read_text()
    for name in ("message-000010", "message-000015", "message-000020"):
        assert story.count(f'"what":"handed_out","event":"{name}"') >= 2


def test_what_is_never_acknowledged_and_what_names_no_message_is_a_fault() -> None:
    nothing = Report((), published=20, stored=20, redelivered=0, advances=0, looks=3)
    report = CrashReport(
        subject="a.B",
        checked=nothing,
        deaths=(("runner, host.event_bound", False),),
        subscribers=1,
        has_producer=True,
        pending=20,
        strange_rows=2,
        exit_code=1,
        seed=7,
        seconds=1.0,
        history_path="history.jsonl",
    )
    pending, strange, exit_code = report.faults()
    assert pending == "20 messages are never acknowledged at the broker"
    assert strange == "2 stored events name no message in their payload"
    assert "exit code 1" in exit_code
    assert "runner, host.event_bound: not reached" in str(report)
    quiet = replace(report, pending=0, strange_rows=0, exit_code=0)
    assert replace(quiet, unwanted=3).faults() == ["3 events of messages that were to give none"]
    assert replace(quiet, dead_letters=["too big"]).faults() == ["1 events became dead letters, the first: too big"]
    assert replace(report, pending=0, strange_rows=0, exit_code=0).faults() == []
    assert replace(report, has_producer=False, strange_rows=0, exit_code=0).faults() == []


def test_a_trigger_without_a_producer_survives_by_its_keys(broker: FolderBroker, tmp_path: Path) -> None:
    trigger = faulty_inboxes.Poller(str(broker.folder))
    report = crash_test(trigger, broker, messages=40, kills=1, folder=tmp_path / "place")
    assert report.checked.stored == 40
    assert "no producer" in str(report)


def test_messages_that_give_several_events_or_none_survive(broker: FolderBroker, tmp_path: Path) -> None:
    report = crash_test(
        faulty_inboxes.Counting(str(broker.folder)),
        broker,
        messages=40,
        kills=1,
        events_per_message=faulty_inboxes.Counting.events_of,
        folder=tmp_path / "place",
    )
    assert report.faults() == []
    assert report.checked.stored == 4 * sum(number % 4 for number in range(10))


def test_messages_that_give_fewer_events_than_they_should_are_told(broker: FolderBroker, tmp_path: Path) -> None:
    trigger = faulty_inboxes.Counting(str(broker.folder), fires_at_most=2)
    with pytest.raises(CrashTestFailed, match="2 messages gave fewer events than events_per_message says") as failed:
        crash_test(
            trigger,
            broker,
            messages=10,
            kills=0,
            events_per_message=faulty_inboxes.Counting.events_of,
            folder=tmp_path / "place",
        )
    assert failed.value.report.incomplete == 2, "those that end with 3 and 7"
    assert failed.value.report.checked.findings == ()


def test_a_trigger_that_raises_for_ever_is_told_with_what_it_raised(
    broker: FolderBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is stored or forgotten while the message is tried again and again, before it becomes a dead letter.
    monkeypatch.setattr(crash, "SETTLED_AFTER_S", 15.0)
    trigger = faulty_inboxes.Counting(str(broker.folder), raises=True)
    with pytest.raises(
        CrashTestFailed, match="1 events became dead letters, the first: ValueError: not message-000007"
    ) as failed:
        crash_test(
            trigger,
            broker,
            messages=8,
            kills=0,
            events_per_message=faulty_inboxes.Counting.events_of,
            folder=tmp_path / "place",
        )
    assert kinds(failed.value) == {"lost"}


@pytest.mark.parametrize(("events", "words"), [(-1, "must be 0 or more"), (0, "nothing can be lost")])
def test_what_is_no_number_of_events_is_refused(broker: FolderBroker, events: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        crash_test(faulty_inboxes.Counting(str(broker.folder)), broker, events_per_message=events)


def test_a_class_that_no_other_process_can_import_is_refused_at_once(broker: FolderBroker) -> None:
    class Local(faulty_inboxes.Inbox):
        pass

    with pytest.raises(PairFailed, match="defined inside a function"):
        crash_test(Local, broker, kwargs={"folder": str(broker.folder)})


def test_a_producer_that_cannot_be_opened_fails_the_test_soon_and_by_its_error(
    broker: FolderBroker, tmp_path: Path
) -> None:
    with pytest.raises(PairFailed, match=r"fails from the beginning on: .*PollTerminated") as failed:
        crash_producer(faulty_inboxes.Closed, broker, tmp_path / "place", "host.event_bound")
    assert "ConnectionRefusedError: the door is closed" in str(failed.value)


def test_a_supervisor_that_leaves_with_an_error_fails_the_test_at_once(broker: FolderBroker, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"metrics_listen": "127.0.0.1:{1}".format(*taken.getsockname())}
        kwargs = {"folder": str(broker.folder)}
        with pytest.raises(PairFailed, match=r"(?s)exit code 2, before this: .* already in use"):
            crash_test(faulty_inboxes.Inbox, broker, kwargs=kwargs, settings=settings, folder=tmp_path / "place")


def test_the_supervisor_dies_with_the_process_of_the_tests(tmp_path: Path) -> None:
    script = "import sys, pathlib; from headgate.testing.crash.pair import Pair; pair = Pair(pathlib.Path(sys.argv[1]))"
    script += "; pair.start(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        tests.stdout.readline()
        begun = psutil.Process(tests.pid).children()
        tests.kill()
    assert begun
    assert psutil.wait_procs(begun, WITHIN_S)[1] == []


def test_a_publish_that_fails_fails_the_test(broker: FolderBroker, tmp_path: Path) -> None:
    class Full(FolderBroker):
        def __init__(self) -> None:
            self.folder = broker.folder

        def publish(self, messages: Sequence[str]) -> None:
            raise OSError("full")

    with pytest.raises(AssertionError, match="publish") as failed:
        crash_test(
            faulty_inboxes.Inbox, Full(), kwargs={"folder": str(broker.folder)}, kills=1, folder=tmp_path / "place"
        )
    assert isinstance(failed.value.__cause__, OSError)


def test_one_seed_draws_one_plan_and_all_marks_come_before_any_comes_again() -> None:
    trigger = FileLogTrigger("log", "g")
    plan = plan_deaths(200, trigger, 7)
    assert plan == plan_deaths(200, trigger, 7)
    assert plan != plan_deaths(200, trigger, 8)
    at_marks = [death.mark for death in plan if death.mark]
    different = len(set(at_marks))
    assert different >= 14
    assert len(set(at_marks[:different])) == different
    assert {death.victim for death in plan} == {"runner", "supervisor"}
