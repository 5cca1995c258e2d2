"""What a frame log says: every break of the order is found, and every frame reads as one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headgate.protocol import Direction
from headgate.protocol.framelog.log import FINDINGS_MAX, FrameLogWriter, Record, describe, encode_record, verify
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.queries import LastEvent, Request, Response, StoredEvent
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelTrigger,
    Drain,
    FinishedTrigger,
    FiredEvent,
    Hello,
    Refusal,
    RefusedEvent,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)

FROM_RUNNER = Direction.FROM_RUNNER


def hello(incarnation: int = 1) -> Hello:
    return Hello(PROTOCOL_VERSION, incarnation, 4711, "0.1.0")


def welcome(incarnation: int = 1) -> Welcome:
    return Welcome(PROTOCOL_VERSION, incarnation, RunnerSettings())


def direction_of(message: Message) -> Direction:
    return next(d for d in Direction if type(message) in RUNNER_WIRE.types[d.sender])


def empty_file(folder: Path) -> Path:
    writer = FrameLogWriter(folder)
    writer.close()
    return writer.path


def findings(
    folder: Path, frames: Sequence[tuple[int, Message] | tuple[int, Message, float]]
) -> list[tuple[str, int, str]]:
    """Write the frames, given as (incarnation, message[, time]); return severity, frame number and problem."""
    path = empty_file(folder)
    offsets = []
    data = path.read_bytes()
    for number, (incarnation, message, *time) in enumerate(frames):
        offsets.append(len(data))
        moment = float(time[0]) if time else float(number)
        data += encode_record(moment, direction_of(message), incarnation, encode_message(message))
    path.write_bytes(data)
    return [(f.severity, offsets.index(f.offset), f.problem) for f in verify(path).findings]


SHAKEN: list[tuple[int, Message]] = [(1, hello()), (1, welcome())]


def test_a_conversation_in_order_has_no_findings(tmp_path: Path) -> None:
    conversation: list[tuple[int, Message]] = [
        *SHAKEN,
        (1, StateSync(0, more=True)),
        (1, StateSync(0)),
        (1, StateChanges(1, more=True)),
        (1, StateSync(0)),
        (1, StateChanges(1)),
        (1, Request(1, LastEvent(1))),
        (1, StateSync(1, more=True)),
        (1, Response(1)),
        (1, StateSync(1)),
        (1, StateChanges(2)),
        (1, Drain(1.0)),
        (1, StateChanges(3)),
        (1, StateSync(2)),
        (2, hello(2)),
        (2, welcome(2)),
        (2, StateChanges(1)),
        (4, hello(4)),
    ]
    assert findings(tmp_path, conversation) == []


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([(1, StateChanges(1))], [(0, "the runner sent StateChanges in state OPENING")]),
        ([(1, welcome()), (1, StateChanges(1))], [(0, "the supervisor sent Welcome in state OPENING")]),
        ([*SHAKEN, (1, hello())], [(2, "the runner sent Hello in state READY")]),
        ([*SHAKEN, (1, Drain(1.0)), (1, Drain(1.0))], [(3, "the supervisor sent Drain in state DRAINING")]),
        ([*SHAKEN, (2, StateSync())], [(2, "the supervisor sent StateSync in state OPENING")]),
        ([(1, hello(2)), (1, welcome())], [(0, "Hello carries incarnation 2, not 1")]),
        ([(1, hello()), (1, welcome(3))], [(1, "Welcome carries incarnation 3, not 1")]),
        (
            [(2, hello(2)), (1, hello(1))],
            [(1, "a frame of incarnation 1 follows one of incarnation 2")],
        ),
        ([*SHAKEN, (1, StateChanges(2))], [(2, "round 2 was sent, but round 1 was due")]),
        ([*SHAKEN, (1, StateChanges(1)), (1, StateChanges(1))], [(3, "round 1 was sent, but round 2 was due")]),
        ([*SHAKEN, (1, StateChanges(1)), (1, StateChanges(3))], [(3, "round 3 was sent, but round 2 was due")]),
        (
            [*SHAKEN, (1, StateChanges(1, more=True)), (1, StateChanges(2))],
            [(3, "round 2 was sent, but round 1 was due")],
        ),
        ([*SHAKEN, (1, StateSync(1))], [(2, "StateSync answers round 1, which was not sent before it")]),
        (
            [*SHAKEN, (1, StateChanges(1, more=True)), (1, StateSync(1))],
            [(3, "StateSync answers round 1, which was not sent before it")],
        ),
        (
            [*SHAKEN, (1, StateChanges(1)), (1, StateSync(1)), (1, StateSync(1))],
            [(4, "StateSync answers round 1, but round 2 was due")],
        ),
        (
            [*SHAKEN, (1, StateChanges(1)), (1, StateChanges(2)), (1, StateSync(2))],
            [(4, "StateSync answers round 2, but round 1 was due")],
        ),
        (
            [*SHAKEN, (1, StateChanges(1)), (1, StateSync(1, more=True)), (1, StateSync(0)), (1, StateSync(1))],
            [(4, "StateSync of round 0 was sent before that of round 1 was complete")],
        ),
    ],
)
def test_a_break_of_the_order_is_found_once_where_it_is(
    tmp_path: Path, frames: list[tuple[int, Message]], expected: list[tuple[int, str]]
) -> None:
    assert findings(tmp_path, frames) == [("error", number, problem) for number, problem in expected]


def test_a_clock_set_back_is_a_warning_within_an_incarnation_only(tmp_path: Path) -> None:
    frames: list[tuple[int, Message, float]] = [
        (1, hello(), 10.0),
        (1, welcome(), 9.5),
        (2, hello(2), 5.0),
        (2, welcome(2), 5.0),
    ]
    assert findings(tmp_path, frames) == [("warning", 1, "the time goes backwards by 0.500000 s")]


def test_a_body_that_is_no_message_is_an_error(tmp_path: Path) -> None:
    path = empty_file(tmp_path)
    path.write_bytes(path.read_bytes() + encode_record(0.0, FROM_RUNNER, 1, b"\xc1"))
    verification = verify(path)
    assert not verification.ok
    assert "malformed body of 1 bytes" in verification.findings[0].problem


def test_what_was_found_is_counted(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path, clock=iter([10.0, 11.0, 20.0]).__next__)
    for incarnation, message in ((1, hello()), (1, welcome()), (3, hello(3))):
        writer.record(direction_of(message), incarnation, message, encode_message(message))
    writer.close()
    verification = verify(writer.path)
    assert (verification.frames, verification.incarnations) == (3, (1, 3))
    assert (verification.started, verification.ended) == (10.0, 20.0)
    assert verification.ok
    assert verification.path == str(writer.path)


def test_findings_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = empty_file(tmp_path)
    path.write_bytes(path.read_bytes() + encode_record(0.0, FROM_RUNNER, 1, b"\xc1") * (FINDINGS_MAX + 7))
    verification = verify(path)
    assert len(verification.findings) == FINDINGS_MAX
    assert verification.findings_left_off == 7
    assert not verification.ok


# --- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (hello(3), "runner -> supervisor  Hello version=3 pid=4711 0.1.0"),
        (welcome(3), "runner <- supervisor  Welcome version=3 incarnation=3"),
        (Request(4, LastEvent(5)), "runner -> supervisor  Request id=4 last event of trigger 5"),
        (
            Response(4, StoredEvent("run", 1, b'{"a":1}')),
            'runner <- supervisor  Response id=4 payload={"a":1}',
        ),
        (Response(4, error="gone"), "runner <- supervisor  Response id=4 error=gone"),
        (Drain(2.5), "runner <- supervisor  Drain deadline=2.5s"),
        (StateChanges(1), "runner -> supervisor  StateChanges round=1"),
        (
            StateChanges(
                1,
                events=(FiredEvent(5, "run", 2, 7, b"1", "k"), FiredEvent(5, "run", 3, 0, b"2")),
                refused=(RefusedEvent(6, "run", 0, 8, "too long", 9, b"h"),),
                finished=(FinishedTrigger(7, "run", "failed", 0, "ValueError: x\ny"),),
                stuck=(1, 2, 3, 4),
                more=True,
            ),
            "runner -> supervisor  StateChanges round=1 events=2[5/2 seq=7 key=k 1, 5/3 seq=0 key=- 2] "
            "refused=1[6/0 9 B too long] finished=1[7 failed ValueError: x\\ny] stuck=4[1, 2, 3, ...] more",
        ),
        (
            StateSync(
                2,
                persisted=(1, 2),
                refused=(Refusal(3, 1, "bad", True),),
                to_create=(TriggerSpec(1, "run", "orders", "a.B", b"secret"),),
                to_cancel=(CancelTrigger(2, "user"),),
                more=True,
            ),
            "runner <- supervisor  StateSync round=2 persisted=2[1, 2] refused=1[3 bad] "
            "to_create=1[1 orders a.B] to_cancel=1[2 user] more",
        ),
    ],
)
def test_a_frame_reads_as_one_line(message: Message, line: str) -> None:
    body = encode_message(message)
    record = Record(16, 1_750_000_000.5, direction_of(message), 3, body)
    assert describe(record) == f"2025-06-15 15:06:40.500000 #3 {line}  {len(body)} B"


def test_payloads_are_cut_and_control_characters_are_escaped() -> None:
    payload = b"\x1b[2J\xff" + "ü".encode() + b"x" * 1_000_000
    changes = StateChanges(1, events=(FiredEvent(1, "run", 0, 1, payload),))
    line = describe(Record(16, 0.0, FROM_RUNNER, 1, encode_message(changes)))
    assert line.isprintable()
    assert len(line) < 250
    assert r"\x1b[2J\xffüxxx" in line
    assert "xxx...]" in line


def test_what_cannot_be_read_is_a_line_too() -> None:
    assert "undecodable: the runner sent a malformed body of 1 bytes" in describe(
        Record(16, 1e300, FROM_RUNNER, 1, b"\xc1")
    )
