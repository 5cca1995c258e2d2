"""Bodies: every message comes back as it was, and whatever else is in a body is refused with a reason."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.golden import check_golden, fields_at_default, read_golden
from tests.protocol.strategies import strategy_of

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, Message
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages import runner as messages
from headgate.protocol.messages.queries import (
    GetConnection,
    GetTaskStates,
    GetVariable,
    LastEvent,
    Request,
    Response,
    SecretText,
    StoredEvent,
    TaskState,
    TaskStates,
)
from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelTrigger,
    Credit,
    DescribedLane,
    DescribedStream,
    DescribedTrigger,
    Drain,
    FinishedTrigger,
    FiredEvent,
    Hello,
    LaneProgress,
    Redelivery,
    RedeliveryEnd,
    Refusal,
    RefusedEvent,
    RunnerFigures,
    RunnerSettings,
    StateChanges,
    StateSync,
    StreamFigures,
    TriggerSpec,
    Welcome,
)

ROLES = (Role.RUNNER, Role.SUPERVISOR)
ANY_MESSAGE = {role: st.one_of([strategy_of(type_) for type_ in kinds]) for role, kinds in RUNNER_WIRE.types.items()}

PROGRESS = LaneProgress(
    lane="3",
    began=(1, 2),
    begun_at=1790000000.5,
    is_ours=True,
    committed_at=1790000001.5,
    cursor="c",
    advanced=(3, 4),
    asked=(5, 6),
    dropped=(7,),
    missing=8,
    began_deliveries=9,
    deliveries=10,
)

# One of each, every field apart from its default, so that the order of the fields is pinned as well.
EXAMPLES: dict[str, Message] = {
    "Hello": Hello(protocol_version=3, incarnation=3, pid=4711, headgate_version="0.1.0"),
    "StateChanges": StateChanges(
        round=12,
        events=(
            FiredEvent(
                trigger_id=5,
                trigger_run_id="run-5",
                sequence_index=2,
                seq=77,
                payload=b'{"a":1}',
                key="orders-0.jsonl:128",
                position=1,
                kind="success",
                is_last=True,
            ),
        ),
        refused=(
            RefusedEvent(
                trigger_id=6,
                trigger_run_id="run-6",
                sequence_index=0,
                seq=78,
                reason="payload is a function",
                payload_bytes=9,
                payload_head=b"head",
                key="k",
                position=2,
                is_whole=True,
                content="message",
                kind="failed",
                is_last=True,
                traceback="Traceback of the message",
            ),
        ),
        finished=(
            FinishedTrigger(
                trigger_id=7,
                trigger_run_id="run-7",
                outcome="cancelled",
                events=4,
                error="Error",
                traceback="Traceback",
                reason="reassigned",
                message_key="berlin:4711",
            ),
        ),
        stuck=(8, 300),
        more=True,
        described=(DescribedTrigger(trigger_id=10, trigger_run_id="run-10", stream="d1", stream_name="('log', 1)"),),
        redriven=(
            RedeliveryEnd(letter_id=21, trigger_id=5, trigger_run_id="run-5", outcome="failed", error="no form"),
        ),
        figures=RunnerFigures(
            streams=(
                StreamFigures(
                    stream="d1",
                    name="('log', 1)",
                    in_flight=3,
                    queued=4,
                    lanes=2,
                    online=5,
                    absent=1,
                    lag=70000,
                    lag_unit="bytes",
                    held="absent subscriber",
                    held_since=1790000000.5,
                    held_by=(9, 300),
                    oldest_at=1790000001.5,
                    acked=70001,
                    failed=6,
                    rejected=7,
                    ended=8,
                    last_error="ConnectionError: gone",
                    last_error_at=1790000002.5,
                    progress=(PROGRESS,),
                ),
            ),
            streams_in_all=201,
        ),
        streams=(
            DescribedStream(
                stream="d1",
                lanes=(
                    DescribedLane(
                        lane="0",
                        end=(9,),
                        first=(1,),
                        committed=(1700000000000, 3),
                        lag=4,
                        missing=5,
                        is_shared=True,
                        before=(6,),
                        after=(7,),
                        oldest_key="k",
                        oldest_at=1790000003.5,
                        deliveries=11,
                        before_deliveries=12,
                    ),
                ),
                lanes_in_all=2,
                error="none",
                is_missing=True,
                progress=(PROGRESS,),
            ),
        ),
    ),
    "Request": Request(id=9, query=LastEvent(trigger_id=5)),
    "RequestVariable": Request(id=10, query=GetVariable("v")),
    "RequestConnection": Request(id=11, query=GetConnection("c")),
    "RequestStates": Request(id=12, query=GetTaskStates("d", run_id="r", logical_date_s=1.5, task_ids=("t",))),
    "ResponseSecret": Response(id=10, result=SecretText("s"), error="none"),
    "ResponseStates": Response(
        id=12,
        result=TaskStates(
            run_id="r", run_state="running", tasks=(("t", TaskState.DEFERRED),), missing=("u",), has_dag=False
        ),
        error="none",
    ),
    "Welcome": Welcome(
        protocol_version=3,
        incarnation=3,
        settings=RunnerSettings(
            heartbeat_s=1.5,
            frame_bytes_max=1,
            event_bytes_max=2,
            round_events_max=3,
            outbox_events_max=4,
            subscriber_queue_max=5,
            ack_timeout_s=6.5,
            cohort_grace_s=7.5,
            cancel_grace_s=8.5,
            hook_timeout_s=9.5,
            blocked_after_s=10.5,
            import_paths=("triggers",),
            advance_timeout_s=11.5,
        ),
    ),
    "StateSync": StateSync(
        round=12,
        persisted=(77, 70000),
        refused=(Refusal(seq=78, trigger_id=6, reason="too long", payload_kept=True),),
        to_create=(
            TriggerSpec(
                trigger_id=9,
                trigger_run_id="run-9",
                name="n",
                classpath="a.B",
                kwargs=b"{}",
                stream="d2",
                passed_over=("berlin:4711", "paris:12"),
                takes_one_event=True,
                credit=100,
            ),
        ),
        to_cancel=(CancelTrigger(trigger_id=5, reason="user"),),
        more=True,
        lease_s=24.5,
        lease_lost=True,
        absent=(AbsentSubscriber(trigger_id=11, stream="d3"),),
        redeliveries=(
            Redelivery(letter_id=21, trigger_id=5, trigger_run_id="run-5", key="berlin:4711", message=b'{"b":2}'),
        ),
        credits=(Credit(trigger_id=9, trigger_run_id="run-9", events=150),),
        describe=("d3",),
    ),
    "Response": Response(
        id=9, result=StoredEvent(trigger_run_id="run-5", sequence_index=2, payload=b"1", key="k"), error="none"
    ),
    "Drain": Drain(deadline_s=30.5),
}


@pytest.mark.parametrize("role", ROLES)
@settings(deadline=None)  # the first draw from a strategy builds it
@given(data=st.data())
def test_every_message_comes_back_as_it_was(role: Role, data: st.DataObject) -> None:
    message = data.draw(ANY_MESSAGE[role])
    assert RUNNER_WIRE.decode(role, encode_message(message)) == message


def test_the_unions_and_the_types_by_role_are_the_same() -> None:
    assert set(RUNNER_WIRE.types[Role.RUNNER]) == set(typing.get_args(messages.FromRunner))
    assert set(RUNNER_WIRE.types[Role.SUPERVISOR]) == set(typing.get_args(messages.FromSupervisor))


@pytest.mark.parametrize("role", ROLES)
@given(body=st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_remote_error(role: Role, body: bytes) -> None:
    try:
        assert type(RUNNER_WIRE.decode(role, body)) in RUNNER_WIRE.types[role]
    except RemoteProtocolError:
        pass


@given(data=st.data())
def test_a_message_with_flipped_bytes_raises_nothing_but_a_remote_error(data: st.DataObject) -> None:
    body = bytearray(encode_message(data.draw(st.sampled_from(list(EXAMPLES.values())))))
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[position] ^= data.draw(st.integers(1, 255))
    for role in ROLES:
        try:
            assert type(RUNNER_WIRE.decode(role, bytes(body))) in RUNNER_WIRE.types[role]
        except RemoteProtocolError:
            pass


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "malformed body of 0 bytes"),
        (b"\xc1", "malformed body of 1 bytes"),
        (msgspec.msgpack.encode(5), "malformed body"),
        (msgspec.msgpack.encode([]), "malformed body"),
        (msgspec.msgpack.encode({"hello": 1}), "malformed body"),
        (msgspec.msgpack.encode(["goodbye", 1]), "unknown tag 'goodbye'"),
        (msgspec.msgpack.encode(["hello", 1]), "malformed Hello: .*at least length 5"),
        (msgspec.msgpack.encode(["hello", "one", 1, 1, ""]), r"malformed Hello: Expected `int`, got `str`.*\[1\]"),
        (msgspec.msgpack.encode(["hello", 1, 1, 1, "", 0]) + b"\x00", "malformed body"),
        (b"\x95\xa5hello\x01\x01\x01\xa1\xff", "malformed Hello: .*utf-8"),
        (b"\x96\xa5hello\x01\x01\x01\xa0" + b"\x91" * 100_000 + b"\xc0", "malformed body"),
        (b"\x96\xa7changes\x01\xdd\xff\xff\xff\xff", "malformed body"),
        (encode_message(Drain(1.0)), "the runner sent Drain, which only the supervisor may send"),
    ],
)
def test_a_bad_body_is_refused_with_what_is_wrong(body: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        RUNNER_WIRE.decode(Role.RUNNER, body)


def test_a_runners_message_is_not_taken_from_the_supervisor() -> None:
    with pytest.raises(RemoteProtocolError, match="the supervisor sent Hello, which only the runner may send"):
        RUNNER_WIRE.decode(Role.SUPERVISOR, encode_message(EXAMPLES["Hello"]))


def test_a_field_that_a_newer_peer_appended_is_skipped() -> None:
    parts = msgspec.msgpack.decode(encode_message(EXAMPLES["StateSync"]))
    assert RUNNER_WIRE.decode(Role.SUPERVISOR, msgspec.msgpack.encode([*parts, "new"])) == EXAMPLES["StateSync"]


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, 2**64, 1, ""),
        Hello(1, 1, 1, "\ud800"),
        Request(1, object()),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_form_on_the_wire_is_a_local_error(message: Message) -> None:
    with pytest.raises(LocalProtocolError, match=f"{type(message).__name__} cannot be encoded"):
        encode_message(message)


def test_the_golden_frames_hold_every_message_and_no_field_of_them_is_at_its_default() -> None:
    kinds = {*RUNNER_WIRE.types[Role.RUNNER], *RUNNER_WIRE.types[Role.SUPERVISOR]}
    assert {type(message) for message in EXAMPLES.values()} == kinds
    assert not fields_at_default(EXAMPLES.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_wire_is_what_it_was(name: str) -> None:
    """Golden frames are added to, never changed: a peer of this protocol version is out there."""
    check_golden(RUNNER_WIRE, EXAMPLES, name, "messages-v3.txt")


def test_a_frame_of_before_a_field_was_appended_is_read_with_its_default() -> None:
    """The golden frame as a peer would send it that knows no field after ``more``."""
    parts = msgspec.msgpack.decode(read_golden("messages-v3.txt")["StateSync"])
    sync = RUNNER_WIRE.decode(Role.SUPERVISOR, msgspec.msgpack.encode(parts[:-6]))
    changed = {"lease_s": None, "lease_lost": False, "absent": (), "redeliveries": (), "credits": (), "describe": ()}
    assert sync == msgspec.structs.replace(EXAMPLES["StateSync"], **changed)


def test_a_round_of_before_there_were_figures_has_none() -> None:
    parts = msgspec.msgpack.decode(read_golden("messages-v3.txt")["StateChanges"])
    changes = RUNNER_WIRE.decode(Role.RUNNER, msgspec.msgpack.encode(parts[:-2]))
    assert changes == msgspec.structs.replace(EXAMPLES["StateChanges"], figures=None, streams=())
