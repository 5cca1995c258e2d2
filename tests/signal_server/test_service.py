"""The calls of the server, as any program makes them: who may, what is refused, and with which status."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Never, NoReturn

import grpc
import pytest
from structlog.testing import capture_logs
from tests.signal_server.rig import TOKEN, Bare, serving, status_of
from tests.store.harness import OpenStore, Query
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import WITHIN_S

from headgate.protocol import signal_rpc
from headgate.protocol.messages.signals import SIGNAL_BYTES_MAX
from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server.server import CALLS_A_CONNECTION_MAX
from headgate.signal_server.store_thread import StoreThread
from headgate.store.errors import DatabaseAway, DatabaseFault, DatabaseReplaced, StoreError
from headgate.store.store import Store


@pytest.fixture
def bare(database_url: str) -> Iterator[Bare]:
    with serving(database_url) as server, Bare(server.address) as bare:
        yield bare


def new(key: str, value: bytes = b"1", **fields: Any) -> pb.NewSignal:
    return pb.NewSignal(key=key, value=value, **fields)


def test_signals_are_sent_listed_and_heard(bare: Bare, store: Store) -> None:
    assert bare.send(new("a", b'{"auc": 0.93}', dedup="d"), new("b"), sender="flink") == [(1, True), (1, True)]
    assert bare.send(new("a", dedup="d"), new("a", b"")) == [(1, False), (2, True)]
    first, second = bare.list("a")
    assert (first.version, first.value, first.dedup, first.sender) == (1, b'{"auc": 0.93}', "d", "client flink")
    assert (second.value, second.sender, second.HasField("run")) == (b"null", "a client over gRPC", False)
    assert [one.version for one in bare.list("a", version=2)] == [2]
    assert [one.version for one in bare.list("a", limit=1)] == [1]
    assert bare.list("a", namespace="other") == []
    stream = bare.listen("a", after=1)
    answer = next(stream)
    assert ([one.version for one in answer.signals], answer.seen) == ([2], 2)
    stream.cancel()
    assert store.signals.newest("a")[-1].dedup.startswith("auto:")


def test_the_first_answer_to_a_listener_comes_at_once_and_says_where_the_key_is(bare: Bare) -> None:
    bare.send(new("a"), new("a"))
    for key, seen in (("a", 2), ("nothing", 0)):
        stream = bare.listen(key)
        answer = next(stream)
        assert (list(answer.signals), answer.seen) == ([], seen)
        stream.cancel()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((signal_rpc.AUTHORIZATION, "Bearer wrong"),),
        ((signal_rpc.AUTHORIZATION, TOKEN),),
        ((signal_rpc.AUTHORIZATION, f"Bearer {TOKEN}x"),),
        (("token", f"Bearer {TOKEN}"),),
    ],
)
def test_without_the_token_nothing_is_answered(bare: Bare, metadata: tuple[tuple[str, str], ...]) -> None:
    expected = ("UNAUTHENTICATED", "the token is missing or wrong")
    assert status_of(lambda: bare.send(new("a"), metadata=metadata)) == expected
    assert status_of(lambda: bare.list("a", metadata=metadata)) == expected
    assert status_of(lambda: next(bare.listen("a", metadata=metadata))) == expected
    assert bare.list("a") == []


def test_calls_without_the_token_that_send_nothing_keep_no_place(database_url: str) -> None:
    silent = threading.Event()

    def never() -> Iterator[Never]:
        silent.wait(WITHIN_S)
        yield from ()

    with serving(database_url) as server, grpc.insecure_channel(server.address) as channel:
        calls: list[Any] = [
            channel.stream_unary(signal_rpc.SEND).future(never()) for _ in range(CALLS_A_CONNECTION_MAX + 10)
        ]
        try:
            assert {call.code().name for call in calls} == {"UNAUTHENTICATED"}
        finally:
            silent.set()


def test_a_server_without_a_token_answers_everybody(database_url: str) -> None:
    with serving(database_url, token=None) as server, Bare(server.address) as bare:
        assert bare.send(new("a"), metadata=()) == [(1, True)]


@pytest.mark.parametrize(
    ("signal", "problem"),
    [
        (new(""), "the key of a signal '' must have 1..512 characters, not 0"),
        (new("a", namespace="n" * 101), "the namespace 'nnn"),
        (new("a", dedup="d" * 513), "the dedup of the signal 'a' 'ddd"),
        (
            new("a", b"x" * (SIGNAL_BYTES_MAX + 1)),
            "the value of the signal 'a' needs 49,153 bytes; the limit is 49,152",
        ),
        (new("a", b"{"), "the value of the signal 'a' is not JSON: "),
        (new("a", b"\xff"), "the value of the signal 'a' is not JSON: "),
        (new("a", b"[" * 20_000 + b"]" * 20_000), "the value of the signal 'a' is not JSON: "),
        (new("a", b"[" * 900 + b"]" * 900), "the value of the signal 'a' is nested deeper than 400 levels of JSON"),
    ],
    ids=["key", "namespace", "dedup", "long", "half", "bytes", "deepest", "deep"],
)
def test_a_malformed_signal_is_refused_and_none_of_its_call_is_sent(
    bare: Bare, signal: pb.NewSignal, problem: str
) -> None:
    code, details = status_of(lambda: bare.send(new("good"), signal))
    assert code == "INVALID_ARGUMENT"
    assert details.startswith(problem)
    assert bare.list("good") == []


def test_what_is_refused_says_that_it_would_be_again(bare: Bare) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        bare.list("a", limit=0)
    assert isinstance(refused.value, grpc.Call)
    assert (signal_rpc.REFUSED, "1") in [tuple(pair) for pair in refused.value.trailing_metadata() or ()]
    assert refused.value.details() == "limit must be from 1 to 1,000: 0"


def test_other_arguments_are_refused_as_by_the_database(bare: Bare) -> None:
    many = [new("a")] * 1001
    assert status_of(lambda: bare.send(*many)) == (
        "INVALID_ARGUMENT",
        "1,001 signals are sent at once; the limit is 1,000",
    )
    assert status_of(lambda: bare.send(new("a"), sender="x\n"))[1] == "the sender 'x\\n' must not contain '\\n'"
    assert status_of(lambda: next(bare.listen("")))[1].startswith("the key of a signal")
    assert status_of(lambda: bare.list("a\0"))[1].startswith("the key of a signal")
    assert bare.list("a") == []


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x03\x0a\x01\xff", b"\x0a\x7fshort"], ids=["tag", "text", "short"])
def test_bytes_that_are_no_message_are_refused(bare: Bare, data: bytes) -> None:
    for method, name in (
        (signal_rpc.SEND, "SendRequest"),
        (signal_rpc.LIST, "ListRequest"),
        (signal_rpc.LISTEN, "ListenRequest"),
    ):
        said = f"the request is not a message headgate.signals.v1.{name} of signals.proto in the form of protobuf"
        assert status_of(partial(bare.say, method, data)) == ("INVALID_ARGUMENT", said)
    assert status_of(lambda: bare.say(signal_rpc.SEND, b"\xff", metadata=()))[0] == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DatabaseAway("URL", "SECRET"), ("UNAVAILABLE", "the database is away: ")),
        (DatabaseFault("URL", "SECRET"), ("UNAVAILABLE", "the database cannot be used: ")),
        (DatabaseReplaced("URL", "SECRET"), ("UNAVAILABLE", "the database cannot be used: ")),
        (StoreError("SECRET at URL"), ("INTERNAL", "the server of signals has failed: ")),
        (RuntimeError("SECRET at URL"), ("INTERNAL", "the server of signals has failed: ")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_failed_here_is_in_the_log_and_not_in_the_status(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception, status: tuple[str, str]
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(StoreThread, "call", fail)
    with capture_logs() as logs, serving(sqlite_url) as server, Bare(server.address) as bare:
        calls: tuple[Callable[[], object], ...] = (lambda: bare.list("a"), lambda: next(bare.listen("a", after=0)))
        for call in calls:
            assert status_of(call) == (status[0], f"{status[1]}the log of the server of signals says why")
    told = [(record["call"], record["exc_info"]) for record in logs if record["event"] == "a call has failed"]
    assert told == ([("list", True), ("listen", True)] if status[0] == "INTERNAL" else [])


def test_a_frame_that_is_too_large_is_refused_before_it_is_read(bare: Bare) -> None:
    code, details = status_of(lambda: bare.send(new("a", b"x" * (signal_rpc.REQUEST_BYTES_MAX + 1))))
    assert code == "RESOURCE_EXHAUSTED"
    assert "larger than max" in details
    assert bare.send(new("a")) == [(1, True)], "the link goes on"


def test_a_signal_for_one_run_names_it(bare: Bare, open_store: OpenStore, query: Query) -> None:
    Tasks(open_store(), query)
    run = pb.Run(dag="etl", run_id="r1")
    assert bare.send(pb.NewSignal(key="a", run=run), pb.NewSignal(key="a", run=pb.Run(dag="etl", run_id="latest"))) == [
        (1, True),
        (2, True),
    ]
    assert [(one.run.dag, one.run.run_id) for one in bare.list("a")] == [("etl", "r1")] * 2
    unknown = pb.NewSignal(key="a", run=pb.Run(dag="etl", run_id="r2"))
    assert status_of(lambda: bare.send(unknown)) == ("NOT_FOUND", "there is no run named 'r2' in the DAG etl")
    no_dag = pb.NewSignal(key="a", run=pb.Run(dag="x" * 5000, run_id="r2"))
    code, details = status_of(lambda: bare.send(no_dag))
    assert (code, len(details)) == ("NOT_FOUND", 1000), "it has to fit a header"
