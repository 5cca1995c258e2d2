"""Replaying logs that real cores made in this process: what is the same replays clean, what was changed does not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.replay.live import Live
from tests.supervisor.replay.replay_harness import (
    FILE_HEADER_BYTES,
    a_bit_of_everything,
    assert_clean,
    edited,
    fired,
    problem,
    replayed,
    with_field,
)

from headgate.protocol.framelog.log import FrameLogWriter, Record, describe, encode_record, read_frames
from headgate.protocol.link.runner_dialect import Direction, Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.queries import (
    GetConnection,
    GetTaskStates,
    GetVariable,
    LastEvent,
    Query,
    Request,
    Response,
    SecretText,
    StoredEvent,
    TaskStates,
)
from headgate.protocol.messages.runner import (
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    Hello,
    RefusedEvent,
    StateSync,
)
from headgate.store.db.engine import open_engine
from headgate.store.errors import DatabaseAway
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.supervisor.replay import supervisor_run
from headgate.supervisor.replay.run import (
    DatabaseNotFresh,
    LogIncomplete,
    ReplayStore,
    open_replay_store,
    replay,
)


def test_a_log_with_a_bit_of_everything_replays_clean(live: Live) -> None:
    a_bit_of_everything(live)
    result = assert_clean(live.files())
    assert (result.supervisors, result.runners) == (2, 4)
    rows = list(live.store.inspect.events())
    assert result.rows == len(rows)
    assert result.redelivered == sum(row.redelivered for row in rows) > 0
    assert result.dead_letters == 1


def test_a_log_whose_run_ids_are_not_those_of_the_replay_replays_clean(live: Live) -> None:
    """The supervisor has a later epoch than the replay's: others had registered before the log begins."""
    for number in range(2):
        epoch = live.store.register_triggerer(
            hostname="early", pid=number, machine="m", process_started=0.0, capacity=1, queues=("default",)
        )
        live.store.release_triggerer(epoch)
    for name in ("one", "two"):
        live.store.add_watcher(name, "users.One", {})
    live.start_runner()
    first = live.specs()
    described = [DescribedTrigger(spec.trigger_id, spec.trigger_run_id, "digest", "name") for spec in first.values()]
    live.round(described=tuple(described))
    second = live.specs()
    assert {spec.stream for spec in second.values()} == {"digest"}
    live.round(*(fired(spec, 0) for spec in second.values()))
    result = assert_clean(live.files())
    assert not first["one"].trigger_run_id.startswith("1.")
    assert result.rows == 2


def test_a_log_torn_anywhere_replays_clean(live: Live, tmp_path: Path) -> None:
    a_bit_of_everything(live)
    whole = live.files()[0].read_bytes()
    ends = [record.offset for record in read_frames(live.files()[0]) if isinstance(record, Record)]
    copy = tmp_path / "torn.hgframe"
    for begin, end in pairwise(ends):
        for cut in (begin + 5, end - 1):  # within the header of a record, and within its body
            copy.write_bytes(whole[:cut])
            assert assert_clean([copy]).torn == 1
    assert_clean([copy, live.files()[1]])


@pytest.mark.parametrize("stored", [0, 1, 2, 3])
def test_a_round_in_doubt_was_stored_as_far_as_the_log_shows_it(live: Live, stored: int) -> None:
    """The supervisor died with a round unanswered; its successor answers a query about the last event."""
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    one = live.specs()["one"]
    live.round(fired(one, 0))
    events = tuple(fired(one, index) for index in range(1, 4))
    live.round(*events, heard=False)
    if stored:
        live.store.store_slice(live.core.leases.epoch, events=events[:stored])
    live.start_supervisor()
    live.start_runner()
    live.say(Request(1, LastEvent(one.trigger_id)))
    (answer,) = [message.result for message in live.sent if isinstance(message, Response)]
    assert isinstance(answer, StoredEvent)
    assert answer.sequence_index == stored
    live.round(*(msgspec.structs.replace(event, trigger_run_id=live.specs()["one"].trigger_run_id) for event in events))
    result = assert_clean(live.files())
    assert (result.rows, result.redelivered) == (4, stored)


def test_a_dead_runners_last_round_is_stored_and_answered_to_nobody(live: Live, tmp_path: Path) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    live.round(fired(live.specs()["one"], 0))
    live.round(fired(live.specs()["one"], 1), answered=False)
    live.start_runner()
    live.say(Request(1, LastEvent(1)))
    live.round(fired(live.specs()["one"], 2))
    assert assert_clean(live.files()).rows == 3

    def confirm_later(number: int, message: Message) -> Message:
        # I6: a confirmation of an earlier incarnation never reaches a later one.
        if number > 8 and isinstance(message, StateSync) and message.persisted:
            return msgspec.structs.replace(message, persisted=(2, *message.persisted))
        return message

    assert problem([edited(live.files()[0], tmp_path, confirm_later)]) == "persisted[0] is 2, replayed 3"


def test_what_a_database_held_before_the_log_is_taken_as_given(live: Live) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    one = live.specs()["one"]
    live.store.store_slice(
        live.core.leases.epoch, events=(FiredEvent(one.trigger_id, "0.9.1.1", 5, 0, b"5", key="old"),)
    )
    live.say(Request(1, LastEvent(one.trigger_id)))
    live.round(fired(one, 0))
    live.say(Request(2, LastEvent(one.trigger_id)))
    assert assert_clean(live.files()).rows == 2


def test_a_query_the_database_did_not_answer_is_not_answered_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()

    def away(trigger_id: int) -> None:
        raise DatabaseAway("postgresql://db/x", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(live.store, "last_event", away)
        live.say(Request(1, LastEvent(1)))
    live.say(Request(2, LastEvent(1)))
    assert_clean(live.files())


def test_what_a_trigger_asked_for_is_masked_and_replays_clean(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.store.tasks.connections.put("db", b"pg://me:hunter22@h")
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    one = live.specs()["one"]
    queries: tuple[Query | LastEvent, ...] = (
        GetVariable("region"),
        GetConnection("db"),
        GetVariable("none"),
        GetVariable(""),
        GetTaskStates("etl"),
        LastEvent(one.trigger_id),
    )
    for number, query in enumerate(queries, 1):
        live.say(Request(number, query))

    def away(name: str) -> None:
        raise DatabaseAway("postgresql://db/x", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(live.store.tasks.variables, "get", away)
        live.say(Request(10, GetVariable("v")))
    live.say(Request(11, GetVariable("v")))
    live.round(fired(one, 0))
    results = [message.result for message in live.sent if isinstance(message, Response)]
    assert [result for result in results if result is not None] == [
        SecretText("the-north"),
        SecretText("pg://me:hunter22@h"),
        SecretText(None),
        TaskStates(has_dag=False),
    ]
    for path in live.files():
        data = path.read_bytes()
        assert b"the-north" not in data
        assert b"hunter22" not in data
        shown = "\n".join(describe(record) for record in read_frames(path) if isinstance(record, Record))
        assert "Request id=1 variable region" in shown
        assert "Response id=2 a secret" in shown
    assert_clean(live.files())


def test_a_lost_lease_replays_clean_and_nothing_is_stored_after_it(live: Live) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    one = live.specs()["one"]
    live.round(fired(one, 0))
    who = {"hostname": "other", "pid": 1, "machine": "m", "process_started": 0.0, "capacity": 1, "queues": ("default",)}
    other = live.store.register_triggerer(**who)  # type: ignore[arg-type]
    live.store.fence_triggerers(other, dead=[live.core.leases.epoch])
    live.pass_time(6.0)
    live.round(fired(one, 1))
    live.round()
    (lost,) = [m for m in live.sent if isinstance(m, StateSync) and m.lease_lost]
    assert [(cancel.trigger_id, cancel.reason) for cancel in lost.to_cancel] == [(one.trigger_id, "reassigned")]
    assert assert_clean(live.files()).rows == 1


def test_a_name_that_was_given_anew_is_another_trigger(live: Live) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    live.start_supervisor()
    live.store.remove_watcher("one")
    live.store.add_watcher("one", "users.Other", {})
    live.start_runner()
    live.round(fired(live.specs()["one"], 0))
    assert_clean(live.files())


def test_a_watcher_removed_between_two_runners_is_not_handed_over(live: Live) -> None:
    for name in ("one", "two"):
        live.store.add_watcher(name, "users.One", {})
    live.start_runner()
    live.store.remove_watcher("two")
    live.start_runner()
    live.round(fired(live.specs()["one"], 0))
    assert_clean(live.files())


def test_until_stops_behind_a_frame_with_the_database_as_it_was_then(live: Live, tmp_path: Path) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    for index in range(3):
        live.round(fired(live.specs()["one"], index))
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    with open_replay_store(url) as store:
        result = replay(live.files(), store, until=7)  # the answer to the second round
        assert result.is_clean
        assert result.frames == 7
    with Store(open_engine(url), secrets=live.store.database.secrets) as kept:
        assert [row.sequence_index for row in kept.inspect.events()] == [0, 1]
        assert [row.name for row in kept.inspect.watchers()] == ["one"]
    with pytest.raises(DatabaseNotFresh, match="is not empty"), open_replay_store(url):
        pass


def test_a_log_whose_beginning_was_rotated_away_is_taken_up_at_the_first_hello(tmp_path: Path) -> None:
    live = Live(tmp_path / "captured")
    live._writer = FrameLogWriter(live.folder, file_bytes_max=400, files_max=1000, clock=lambda: live.now)
    live.files()[0].unlink()
    live.store.add_watcher("one", "users.One", {})
    for _ in range(2):
        live.start_runner()
        for index in range(20):
            live.round(fired(live.specs()["one"], index))
    files = live.files()
    live.close()
    assert len(files) > 10
    assert assert_clean(files).skipped == 0
    result = assert_clean(files[3:])
    assert result.skipped > 0
    assert (result.runners, result.rows) == (1, 20)
    with pytest.raises(LogIncomplete, match=r"all of its \d+ frames come before the first Hello"):
        replayed(files[-2:])
    with pytest.raises(LogIncomplete, match="is part 5 of a log, and the file before it is part 3"):
        replayed([*files[:4], *files[5:]])


def test_an_event_the_store_loses_or_stores_otherwise_is_a_difference(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bit_of_everything(live)
    honest = ReplayStore.store_slice

    def losing(store: ReplayStore, epoch: Epoch, *, events: Sequence[FiredEvent] = (), **rest: Any) -> Any:
        return honest(store, epoch, events=events[1:], **rest)

    def changing(store: ReplayStore, epoch: Epoch, *, events: Sequence[FiredEvent] = (), **rest: Any) -> Any:
        return honest(store, epoch, events=[with_field(payload=b"0")(event) for event in events], **rest)

    def doubling(store: ReplayStore, epoch: Epoch, *, events: Sequence[FiredEvent] = (), **rest: Any) -> Any:
        twice = [with_field(sequence_index=event.sequence_index + 1000, key=None)(event) for event in events]
        return honest(store, epoch, events=[*events, *twice], **rest)

    for store_slice, expected in (
        (losing, "an event was reported and confirmed, and has no row"),
        (changing, "has the payload b'0', reported b'{\"n\":0}'"),
        (doubling, "a row that was never reported"),
    ):
        monkeypatch.setattr(ReplayStore, "store_slice", store_slice)
        assert expected in problem(live.files())


def test_a_redelivery_that_is_not_counted_is_a_difference(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    a_bit_of_everything(live)
    monkeypatch.setattr("headgate.store.triggers.redeliveries.insert_or_replace", lambda *args, **kwargs: None)
    assert problem(live.files()) == "the database counts 0 redeliveries where 2 came"


def test_an_empty_file_and_one_cut_off_in_its_header_replay_clean(live: Live, tmp_path: Path) -> None:
    copy = tmp_path / "empty.hgframe"
    for length in (0, 7, FILE_HEADER_BYTES):
        copy.write_bytes(live.files()[0].read_bytes()[:length])
        assert assert_clean([copy]).frames == 0


def test_an_incarnation_no_supervisor_comes_to_is_a_difference(tmp_path: Path, live: Live) -> None:
    shutil.copy(live.files()[0], tmp_path / "log.hgframe")
    body = encode_message(Hello(1, 2**60, 1, ""))
    with (tmp_path / "log.hgframe").open("ab") as file:
        file.write(encode_record(0.0, Direction.FROM_RUNNER, 2**60, body))
    assert "comes right after incarnation 0" in problem([tmp_path / "log.hgframe"])
    assert supervisor_run.RUNNERS_SILENT_MAX < 2**60


def test_messages_that_triggers_are_passed_over_replay_clean_over_runners_and_supervisors(live: Live) -> None:
    live.store.add_watcher("one", "users.One", {}, max_deliveries=2)
    live.store.add_watcher("two", "users.Two", {})
    live.start_runner()
    for key in ("b", "b", "a", "a"):
        one, two = live.specs()["one"], live.specs()["two"]
        failed = FinishedTrigger(one.trigger_id, one.trigger_run_id, "failed", 0, error="x", message_key=key)
        again = FinishedTrigger(two.trigger_id, two.trigger_run_id, "failed", 0, error="x", message_key=key)
        live.round(finished=(failed, again))
        live.pass_time(3.0)
    one = live.specs()["one"]
    assert one.passed_over == ("b", "a")
    letter = RefusedEvent(
        *(one.trigger_id, one.trigger_run_id, -1, 1, "x", 2, b"{}", "b", -1), is_whole=True, content="message"
    )
    live.round(refused=(letter,))
    live.start_runner()
    live.core.runner_ended(live.core.runner.incarnation, "exited", live.now)
    live.settle()
    live.start_supervisor()
    live.start_runner()
    assert {name: spec.passed_over for name, spec in live.specs().items()} == {"one": ("b", "a"), "two": ()}
    assert_clean(live.files())
