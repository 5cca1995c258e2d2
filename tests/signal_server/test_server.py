"""The server as a whole: listeners that read nothing, limits, a database that is away, and its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.signal_server.rig import TOKEN, Bare, away, client_of, database_of, serving, status_of
from tests.waiting import WITHIN_S

from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server import server as server_module
from headgate.signal_server.server import ServerRefused, SignalServer, check_address, check_token, read_identity
from headgate.signals import Signal
from headgate.signals.remote import GrpcSignalService
from headgate.store.db import engine
from headgate.store.errors import DatabaseReplaced
from headgate.store.signal_verbs import SignalVerbs


def new(key: str = "a", value: bytes = b"1", **fields: Any) -> pb.NewSignal:
    return pb.NewSignal(key=key, value=value, **fields)


class CountedPages:
    """Counts the pages that listeners have been given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = SignalVerbs.page
        self.count = 0

        def counted(verbs: SignalVerbs, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            return real(verbs, *arguments, **options)

        monkeypatch.setattr(SignalVerbs, "page", counted)


def test_a_listener_that_reads_nothing_holds_nobody_up_and_gets_no_further_page(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = b'"' + b"x" * 40_000 + b'"'
    with serving(database_url) as server, Bare(server.address) as idle, Bare(server.address) as bare:
        for _ in range(10):
            bare.send(*[new(value=value)] * 100)  # 40 MB
        pages = CountedPages(monkeypatch)
        stalled = idle.listen("a", after=0)
        assert [one.version for one in next(stalled).signals] == [1, 2, 3, 4]
        # Others send and hear meanwhile.
        with client_of(server) as client:
            heard = [one.version for one in client.listen_signal("me", "a", version=1000)]
            assert heard == [1000]
            client.send_signal("b", 1)
        given = pages.count
        # Of the 250 pages gRPC has taken few: what its windows hold, and one that waits here.
        assert given < 50
        # What was held up is still there, whole and in order.
        seen = 4
        while seen < 1000:
            for one in next(stalled).signals:
                assert one.version == seen + 1
                seen = one.version
        stalled.cancel()


def test_small_values_come_in_large_pages(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(database_url) as server, Bare(server.address) as bare:
        for _ in range(4):
            bare.send(*[new()] * 1000)
        stream = bare.listen("a", after=0)
        sizes: list[int] = []
        while sum(sizes) < 4000:
            sizes.append(len(next(stream).signals))
        stream.cancel()
    assert sizes == [4, 16, 64, 256, 1000, 1000, 1000, 660]


def test_so_many_listen_at_once_and_who_has_gone_makes_room(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LISTENERS_MAX", 3)
    with serving(database_url) as server, Bare(server.address) as bare:
        streams = [bare.listen("a") for _ in range(3)]
        for stream in streams:
            next(stream)
        assert status_of(lambda: next(bare.listen("a"))) == (
            "RESOURCE_EXHAUSTED",
            "3 listen already, which is the limit",
        )
        assert bare.send(new()) == [(1, True)], "who sends needs no such place"
        streams.pop().cancel()
        with client_of(server) as client:  # asks again until there is room
            assert next(client.listen_signal("me", "a", after=0)).version == 1


def test_so_many_calls_run_at_once(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LISTENERS_MAX", 1)
    monkeypatch.setattr(server_module, "CALLS_MAX", 1)
    with serving(database_url) as server, Bare(server.address) as bare:
        stream = bare.listen("a")
        next(stream)
        with client_of(server) as client, ThreadPoolExecutor(4) as threads:
            sent = list(threads.map(lambda number: client.send_signal("a", number).version, range(20)))
        assert sorted(sent) == list(range(1, 21)), "who is refused for now asks again"


def test_so_many_connections_are_open_at_once(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = tuple(
        (name, 2 if name == "grpc.max_allowed_incoming_connections" else value)
        for name, value in server_module._OPTIONS
    )
    monkeypatch.setattr(server_module, "_OPTIONS", fewer)
    with serving(database_url) as server, Bare(server.address) as one, Bare(server.address) as two:
        one.send(new())
        two.send(new())
        with Bare(server.address) as three:
            assert status_of(lambda: three.send(new()))[0] == "UNAVAILABLE"


def test_the_end_of_the_server_ends_listeners_and_what_was_answered_is_stored(database_url: str) -> None:
    with serving(database_url) as server, Bare(server.address) as bare:
        stream = bare.listen("a")
        next(stream)
        assert bare.send(new()) == [(1, True)]
        assert next(stream).seen == 1
        server.stop()
        assert status_of(lambda: next(stream)) == ("UNAVAILABLE", "the server of signals is stopping")
        assert status_of(lambda: bare.send(new()))[0] == "UNAVAILABLE"
        with serving(database_url) as again, Bare(again.address) as other:
            assert [one.version for one in other.list("a")] == [1]


@pytest.fixture
def own_url(own_database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database that no other test uses, and which is away soon if it is locked."""
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", 0.05)
    return own_database_url


def test_a_database_that_is_away_is_said_and_nothing_is_lost(own_url: str) -> None:
    with serving(own_url) as server, Bare(server.address) as bare, client_of(server) as client:
        client.send_signal("a", 0)
        listening = client.listen_signal("me", "a", after=0)
        assert next(listening).version == 1
        with ThreadPoolExecutor(1) as threads:
            with away(own_url):
                code, details = status_of(lambda: bare.send(new("lost")))
                assert code == "UNAVAILABLE"
                assert details in (
                    "the database is away: the log of the server of signals says why",
                    "the database cannot be used: the log of the server of signals says why",
                )
                later = threads.submit(client.send_signals, [Signal("a", 1, "d"), Signal("a", 2)])
                assert status_of(lambda: bare.send(new("lost")))[0] == "UNAVAILABLE"
            assert [one.version for one in later.result(WITHIN_S)] == [2, 3]
        assert [(one.version, one.value) for one in (next(listening), next(listening))] == [(2, 1), (3, 2)]
        assert client.list_signals("lost") == []
        assert client.send_signal("a", 9, dedup="d").version == 2


def test_a_database_file_that_was_replaced_ends_the_server(sqlite_url: str, tmp_path: Path) -> None:
    has_failed = threading.Event()
    server = SignalServer(database_of(sqlite_url), "127.0.0.1:0", token=TOKEN, failed=has_failed.set)
    with Bare(server.address) as bare:
        bare.send(new())
        (tmp_path / "headgate.db").rename(tmp_path / "moved.db")
        code, details = status_of(lambda: bare.send(new()))
        assert (code, str(tmp_path) in details) == ("UNAVAILABLE", False)
        assert has_failed.wait(WITHIN_S)
        with pytest.raises(DatabaseReplaced):
            server.stop()


# --- what it is started with ----------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "x", ":1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ServerRefused, match="is not an address: give HOST:PORT"):
        check_address(address, has_token=True, is_encrypted=True)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:1", "127.8.8.8:1"])
def test_on_this_machine_neither_a_token_nor_encryption_is_needed(address: str) -> None:
    check_address(address, has_token=False, is_encrypted=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "example.org:1", "127.0.0.1.example.org:1"])
def test_from_other_machines_both_are(address: str) -> None:
    with pytest.raises(ServerRefused, match="without a token give an address of this one"):
        check_address(address, has_token=False, is_encrypted=True)
    with pytest.raises(ServerRefused, match="the token would be sent in clear"):
        check_address(address, has_token=True, is_encrypted=False)
    check_address(address, has_token=True, is_encrypted=True)


def test_a_token_has_some_length_and_can_be_sent() -> None:
    assert check_token("0123456789abcdef\n", "FILE") == "0123456789abcdef"
    with pytest.raises(ServerRefused, match="the token in FILE must have 16 characters or more, not 5"):
        check_token("short\n", "FILE")


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "is empty"),
        ("\r\n", "is empty"),
        ("x" * 1001, "must have no more than 1,000 characters, not 1,001"),
        ("ß" * 20, "must be of printable ASCII"),
        ("two lines of\na file", "must be of printable ASCII characters, without line breaks"),
        ("a tab at the end\t", "must be of printable ASCII"),
        (" a space before it", "must not begin or end with a space"),
        ("a space behind it \n", "must not begin or end with a space"),
    ],
)
def test_a_token_that_cannot_be_sent_is_refused_on_both_sides(token: str, problem: str) -> None:
    with pytest.raises(ServerRefused, match=f"the token in FILE {problem}"):
        check_token(token, "FILE")
    with pytest.raises(ValueError, match=f"the token {problem}"):
        GrpcSignalService("127.0.0.1:1", token)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_line_breaks_at_the_end_of_a_token_belong_to_the_file_on_both_sides(sqlite_url: str, end: str) -> None:
    token = check_token(f"a token, with  spaces{end}", "FILE")
    with serving(sqlite_url, token=token) as server, GrpcSignalService(server.address, f"{token}{end}") as service:
        assert service.send_signal("a").version == 1


def test_a_certificate_goes_with_its_key(tmp_path: Path) -> None:
    assert read_identity(None, None) is None
    with pytest.raises(ServerRefused, match="go together"):
        read_identity(tmp_path, None)
    with pytest.raises(ServerRefused, match="No such file"):
        read_identity(tmp_path / "none", tmp_path / "none")


def test_a_port_that_is_taken_is_refused(database_url: str) -> None:
    with serving(database_url) as server:
        with pytest.raises(ServerRefused, match=r"cannot listen on .*: Address already in use"):
            SignalServer(database_of(database_url), server.address, token=TOKEN)
