"""The runner's log channel: bounded, named, always JSON, and never the end of whoever logs."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio
from tests.waiting import WITHIN_S

from headgate.child import logs, queries
from headgate.child.logs import (
    FIELD_CHARS_MAX,
    RECORD_BYTES_MAX,
    LogChannel,
    configure,
    naming_trigger,
    render,
    render_lines,
)
from headgate.protocol.masking import SecretMask


class Reader:
    """The supervisor's end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rb")

    def lines(self) -> list[bytes]:
        """Everything until the other side closes."""
        return self._file.read().splitlines()


class SlowSocket:
    """Stands in for a socket whose reader can be held up; each ``sendall`` waits for a permission."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.permitted = threading.Semaphore(0)
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.entered.release()
        assert self.permitted.acquire(timeout=WITHIN_S)
        self.sent += data.splitlines()


def channel_on(sock: Any) -> LogChannel:
    return LogChannel(sock)


def test_records_leave_in_order_one_a_line() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = channel_on(ours)
        for number in range(1000):
            channel.put(b'{"n": %d}' % number)
        channel.close()
        ours.close()
        assert [json.loads(line)["n"] for line in Reader(theirs).lines()] == list(range(1000))


def test_whoever_logs_never_waits_and_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RECORDS_WAITING_MAX", 3)
    sock = SlowSocket()
    channel = channel_on(sock)
    channel.put(b'"first"')
    assert sock.entered.acquire(timeout=WITHIN_S)  # the writer is held up with the first record
    for number in range(5):
        channel.put(b'"%d"' % number)
    sock.permitted.release()
    assert sock.entered.acquire(timeout=WITHIN_S)  # it has taken the three that were queued: there is room again
    channel.put(b'"last"')
    for _ in range(2):
        sock.permitted.release()
    channel.close()
    *before, note, last = sock.sent
    assert before == [b'"first"', b'"0"', b'"1"', b'"2"']
    assert json.loads(note) == {"event": "log records were dropped", "level": "warning", "records": 2}
    assert last == b'"last"'


def test_what_was_dropped_last_of_all_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RECORDS_WAITING_MAX", 1)
    sock = SlowSocket()
    channel = channel_on(sock)
    channel.put(b'"first"')
    assert sock.entered.acquire(timeout=WITHIN_S)
    channel.put(b'"queued"')
    channel.put(b'"dropped"')
    for _ in range(2):
        sock.permitted.release()
    channel.close()
    assert json.loads(sock.sent[-1])["records"] == 1


def test_what_is_dropped_is_counted_for_the_trigger_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RECORDS_WAITING_MAX", 1)
    monkeypatch.setattr(logs, "DROPPED_OWNERS_MAX", 2)
    sock = SlowSocket()
    channel = channel_on(sock)
    channel.put(b'"first"')
    assert sock.entered.acquire(timeout=WITHIN_S)
    channel.put(b'"queued"')
    for trigger_id, count in ((1, 2), (2, 3), (3, 4), (4, 5)):
        with naming_trigger({"trigger_id": trigger_id}):
            for _ in range(count):
                channel.put(b'"dropped"')
    for _ in range(2):
        sock.permitted.release()
    channel.close()
    notes = [json.loads(line) for line in sock.sent[2:]]
    assert [(note.get("trigger_id"), note["records"]) for note in notes] == [(1, 2), (2, 3), (None, 9)]


def test_a_reader_that_is_gone_ends_the_writer_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        channel = channel_on(ours)
        for _ in range(10):
            channel.put(b"{}")
        channel.close()
        channel.put(b"{}")


# --- rendering -----------------------------------------------------------------------------------


def test_values_that_json_lacks_become_their_repr() -> None:
    record = {"event": "e", "a": {1, 2}, "b": b"x", "c": ValueError("v"), "d": {"e": object}}
    assert json.loads(render(record)) == {
        "event": "e",
        "a": "{1, 2}",
        "b": "b'x'",
        "c": "ValueError('v')",
        "d": {"e": "<class 'object'>"},
    }


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        ([1, float("inf")], "[1, inf]"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (CYCLE, "[[...]]"),
        (Unspeakable(), "<Unspeakable whose repr raised ValueError>"),
        ("\ud800\0\n", "\ud800\0\n"),
    ],
    ids=["nan", "inf", "key", "cycle", "no repr", "text"],
)
def test_one_field_that_json_refuses_costs_no_other_its_form(value: Any, shown: str) -> None:
    data = render({"event": "e", "n": [1], "value": value})
    assert b"\n" not in data
    # Strict: neither NaN nor Infinity, which Python reads but JSON does not have.
    assert json.loads(data, parse_constant=pytest.fail) == {"event": "e", "n": [1], "value": shown}


@pytest.mark.parametrize("character", ["x", "\0", "\U0001f600", '"'])
@pytest.mark.parametrize("fields", [1, 5, 200])
def test_a_record_that_is_too_long_is_cut_and_stays_json(character: str, fields: int) -> None:
    record: dict[str, Any] = {f"field{number}": character * 100_000 for number in range(fields)}
    record |= {"event": "what happened " + character * 100_000, "level": "error", "trigger_id": 7, "logger": "l"}
    data = render(record)
    assert len(data) <= RECORD_BYTES_MAX
    cut = json.loads(data)
    assert cut["event"].startswith("what happened ")
    assert (cut["level"], cut["trigger_id"]) == ("error", 7)
    assert "characters cut" in cut["event"]


def test_a_cut_traceback_keeps_its_end_which_says_what_happened() -> None:
    record = {"event": "e", "exception": "Traceback\n" + "  File ...\n" * 10_000 + "ValueError: the reason"}
    assert json.loads(render(record))["exception"].endswith("ValueError: the reason")


def test_names_of_fields_count_too() -> None:
    data = render({"event": "e", "k" * 100_000: 1})
    assert len(data) <= RECORD_BYTES_MAX
    assert json.loads(data) == {"event": "e", "cut": True}


@pytest.mark.parametrize("character", ["x", "\0", "\U0001f600", "ä"])
def test_a_record_with_a_long_event_becomes_several_and_not_a_character_is_lost(character: str) -> None:
    names = {"trigger_id": 7, "dag_id": "d", "run_id": "r", "task_id": "t", "try_number": 2, "level": "info"}
    record = {"event": "begin " + character * 100_000 + " end", **names, "rows": 5, "exception": "e" * 100_000}
    parts = [json.loads(line) for line in render_lines(record).split(b"\n")]
    assert max(len(line) for line in render_lines(record).split(b"\n")) <= RECORD_BYTES_MAX
    assert "".join(part["event"] for part in parts) == record["event"]
    assert [part["part"] for part in parts] == list(range(1, len(parts) + 1))
    assert [part.get("more", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(part.items() >= names.items() for part in parts)
    assert (parts[0]["rows"], parts[0]["exception"][-5:]) == (5, "eeeee")


def test_a_record_that_fits_stays_one() -> None:
    assert render_lines({"event": "e" * 50_000}) == render({"event": "e" * 50_000})
    long_field = {"event": "e", "field": "f" * 100_000}
    assert render_lines(long_field) == render(long_field)


# --- who logs ------------------------------------------------------------------------------------


class Captured:
    """A channel that keeps the records."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def put(self, record: bytes) -> None:
        self.data.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data]


@pytest.fixture
def captured() -> Iterator[Captured]:
    """The runner's configuration of both kinds of logging, with a channel that keeps the records."""
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    channel = Captured()
    configure(channel)
    try:
        yield channel
    finally:
        structlog.configure(**before)
        root.handlers = handlers
        root.setLevel(level)


NAMES = {"trigger_id": 7, "trigger_name": "orders", "classpath": "a.B"}


def test_records_of_both_kinds_have_a_level_a_logger_a_time_and_their_fields(captured: Captured) -> None:
    structlog.get_logger("author").warning("%d rows", 3, table="t")
    logging.getLogger("library").error("%d rows", 4)
    logging.getLogger("library").debug("not interesting")
    structlog.get_logger("author").debug("not interesting")
    ours, theirs = captured.records
    assert ours["timestamp"] <= theirs["timestamp"]
    for record in (ours, theirs):
        del record["timestamp"]
    assert ours == {"event": "3 rows", "table": "t", "level": "warning", "logger": "author"}
    assert theirs == {"event": "4 rows", "level": "error", "logger": "library"}


def test_an_exception_comes_with_its_traceback(captured: Captured) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger("author").exception("failed")
        logging.getLogger("library").exception("failed")
    for record in captured.records:
        assert record["event"] == "failed"
        assert "test_logs.py" in record["exception"]
        assert record["exception"].endswith("ValueError: boom")


class Unformattable(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise SystemExit(1)


def remove_other_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove pytest's own handler, which stands beside ours while a test runs, and raises what it cannot format."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [each for each in root.handlers if isinstance(each, logs._ChannelHandler)])


def test_an_exception_that_cannot_be_formatted_costs_its_traceback_and_not_its_record(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_other_handlers(monkeypatch)
    try:
        raise Unformattable
    except Unformattable:
        structlog.get_logger("author").exception("failed", rows=3)
    (record,) = captured.records
    assert (record["event"], record["rows"]) == ("failed", 3)
    assert record["exception"] == "the traceback cannot be shown: formatting it raised SystemExit"


async def test_records_of_a_trigger_carry_its_names_from_wherever_it_logs(captured: Captured) -> None:
    def log(where: str) -> None:
        structlog.get_logger("author").info(where)
        logging.getLogger("library").info(where)

    async def child() -> None:
        log("a task it started")

    async def trigger() -> None:
        log("its own task")
        structlog.contextvars.clear_contextvars()
        log("after clearing structlog's variables")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        await trio.to_thread.run_sync(log, "a thread it started")

    async with trio.open_nursery() as nursery:
        with naming_trigger(NAMES):
            nursery.start_soon(trigger)
        log("not a trigger")
    named = [record for record in captured.records if record["event"] != "not a trigger"]
    assert len(named) == 8
    assert all(record.items() >= NAMES.items() for record in named)
    others = [record for record in captured.records if record["event"] == "not a trigger"]
    assert len(others) == 2
    assert not any("trigger_id" in record for record in others)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_a_record_that_cannot_be_formatted_says_so_and_whoever_logged_it_goes_on(
    captured: Captured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_other_handlers(monkeypatch)
    with naming_trigger(NAMES):
        logging.getLogger("library").error("%d rows", "three")
        logging.getLogger("library").error("%s", Unprintable())
        structlog.get_logger("author").error("%d rows", "three")
        structlog.get_logger("author").error("%s", Unprintable())
        structlog.get_logger("author").error("fine", thing=Unprintable())
    first, second, third, fourth, fifth = captured.records
    assert first["event"] == second["event"] == "a log record could not be formatted"
    assert first["template"] == "'%d rows'"
    assert third["event"].startswith("%d rows (these arguments do not fit: ('three',)")
    assert fourth["event"].startswith("%s (these arguments do not fit:")
    assert fifth["thing"] == "<Unprintable whose repr raised RuntimeError>"
    assert all(record["trigger_id"] == 7 for record in captured.records)
    assert capsys.readouterr().err == ""


# --- secrets --------------------------------------------------------------------------------------


class Holder:
    def __repr__(self) -> str:
        return "Holder(hunter22)"


@pytest.fixture
def told() -> Iterator[SecretMask]:
    with queries.secrets.apart():
        queries.secrets.add('hunter22"ü')
        queries.secrets.add("hunter22")
        queries.secrets.add("123456789")
        yield queries.secrets


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ('a hunter22"ü b', "a *** b"),
        ({"k": ["hunter22", ("x", "hunter22")], "hunter22": 1}, {"k": ["***", ["x", "***"]], "***": 1}),
        (Holder(), "Holder(***)"),
        (b"hunter22", "b'***'"),
        (123456789, "***"),
        (12345678, 12345678),
        (True, True),
        (None, None),
        (1.5, 1.5),
    ],
)
def test_a_secret_is_in_no_value_of_a_record(told: SecretMask, value: object, shown: object) -> None:
    assert json.loads(render({"event": "e", "field": value})) == {"event": "e", "field": shown}


def test_a_secret_is_in_no_key_and_in_no_cycle(told: SecretMask) -> None:
    cycle: list[object] = ["hunter22"]
    cycle.append(cycle)
    data = render({"event": "e", "hunter22": 1, "cycle": cycle, "odd": {Holder(): float("nan")}})
    assert b"hunter22" not in data
    assert json.loads(data)["***"] == 1


def test_no_cut_and_no_split_leaves_half_a_secret(told: SecretMask) -> None:
    for offset in range(0, 60, 7):
        text = "x" * (FIELD_CHARS_MAX // 2 - offset) + "hunter22" * 10 + "y" * RECORD_BYTES_MAX
        for data in (render({"event": "e", "field": text}), render_lines({"event": text})):
            assert b"hunt" not in data
            assert b"er22" not in data


def test_what_says_whose_a_record_is_stays_even_where_it_is_the_text_of_a_variable(told: SecretMask) -> None:
    told.add("warning")
    told.add("my-trigger")
    with naming_trigger({"trigger_name": "my-trigger", "trigger_id": 123456789}):
        data = {"event": "my-trigger", "level": "warning", "trigger_name": "my-trigger", "trigger_id": 123456789}
        assert json.loads(render(data)) == data | {"event": "***"}
        assert json.loads(render({"event": "", "trigger_name": "hunter22"}))["trigger_name"] == "***"


def test_without_secrets_nothing_is_looked_at() -> None:
    with queries.secrets.apart():
        assert json.loads(render({"event": "hunter22", "n": [1, {"a": 2}]})) == {
            "event": "hunter22",
            "n": [1, {"a": 2}],
        }
