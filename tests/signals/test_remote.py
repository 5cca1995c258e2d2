"""`GrpcSignalService`: calls whose answer was lost, links that end, TLS, and servers that refuse or are not there."""

from __future__ import annotations

import datetime
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.signal_server.rig import TOKEN, client_of, database_of, serving
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import WITHIN_S

from headgate.protocol import signal_rpc
from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server.server import ServerRefused, SignalServer, read_identity
from headgate.signals import Signal, listening, remote
from headgate.signals.remote import GrpcSignalService, SignalsRefused, SignalsUnavailable
from headgate.store.store import Store

Handler = Callable[[Any, grpc.ServicerContext], Any]


class Playing:
    """A server that answers as a test says."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answers: list[Handler] = []

    def send(self, request: pb.SendRequest, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return self.answers.pop(0)(request, context)

    def listen(self, request: pb.ListenRequest, context: grpc.ServicerContext) -> Iterator[pb.ListenResponse]:
        self.requests.append(request)
        yield from self.answers.pop(0)(request, context)


@contextmanager
def playing() -> Iterator[tuple[Playing, str]]:
    played = Playing()
    server = grpc.server(ThreadPoolExecutor(4))
    handlers: dict[str, Any] = {
        "Send": grpc.unary_unary_rpc_method_handler(
            played.send, pb.SendRequest.FromString, pb.SendResponse.SerializeToString
        ),
        "Listen": grpc.unary_stream_rpc_method_handler(
            played.listen, pb.ListenRequest.FromString, pb.ListenResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headgate.signals.v1.Signals", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield played, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def failing(code: grpc.StatusCode, *, refused: bool = False, details: str = "") -> Handler:
    def fail(_request: Any, context: grpc.ServicerContext) -> Any:
        if refused:
            context.set_trailing_metadata(((signal_rpc.REFUSED, "1"),))
        context.abort(code, details or f"it is {code.name}")

    return fail


def sent(*versions: int) -> Handler:
    return lambda *_: pb.SendResponse(sent=[pb.SentSignal(version=version, is_new=True) for version in versions])


def page(*versions: int, seen: int = 0) -> pb.ListenResponse:
    signals = [pb.Signal(version=version, value=b"1") for version in versions]
    return pb.ListenResponse(signals=signals, seen=versions[-1] if versions else seen)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"])
def test_a_call_whose_answer_is_lost_is_repeated_with_the_same_dedups(code: str) -> None:
    with playing() as (played, target), GrpcSignalService(target) as service:
        played.answers = [failing(grpc.StatusCode[code]), failing(grpc.StatusCode[code]), sent(1, 2)]
        versions = service.send_signals([Signal("a", 1), Signal("a", 2, "mine")])
        assert [one.version for one in versions] == [1, 2]
        first, second, third = ([one.dedup for one in request.signals] for request in played.requests)
        assert first == second == third
        assert first[0].startswith("auto:")
        assert first[1] == "mine"


@pytest.mark.parametrize(
    ("code", "is_marked"),
    [("UNAUTHENTICATED", False), ("INVALID_ARGUMENT", False), ("NOT_FOUND", False), ("UNAVAILABLE", True)],
)
def test_a_call_that_is_refused_is_not_repeated(code: str, is_marked: bool) -> None:
    with playing() as (played, target), GrpcSignalService(target) as service:
        played.answers = [failing(grpc.StatusCode[code], refused=is_marked)]
        with pytest.raises(SignalsRefused, match=f"it is {code}"):
            service.send_signal("a")
        assert len(played.requests) == 1


def test_a_server_that_does_not_answer_is_named_in_the_end() -> None:
    with playing() as (_, target):
        pass  # there was one
    with GrpcSignalService(target, retry_s=0.0) as service:
        for call in (
            lambda: service.send_signal("a"),
            lambda: service.list_signals("a"),
            lambda: service.listen_signal("me", "a"),
            lambda: next(service.listen_signal("me", "a", after=0)),
        ):
            with pytest.raises(SignalsUnavailable, match=f"the server of signals at {target} does not answer: "):
                call()
        # The time that the listener waits is over first.
        with pytest.raises(SignalsUnavailable):
            list(service.listen_signal("me", "a", after=0, timeout=0))


def test_a_listener_whose_link_is_lost_goes_on_behind_what_it_has_seen() -> None:
    def lost_after(*answers: pb.ListenResponse) -> Handler:
        def listen(_request: Any, context: grpc.ServicerContext) -> Iterator[pb.ListenResponse]:
            yield from answers
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

        return listen

    with playing() as (played, target), GrpcSignalService(target) as service:
        # Also a server that begins too early again, or ends without a reason.
        played.answers = [
            lost_after(page(5, 6)),
            lost_after(),
            lost_after(page(5, 6, 7), page(8)),
            lambda *_: iter([page(seen=11)]),
            lost_after(page(12)),
        ]
        signals = service.listen_signal("me", "a", after=4)
        assert [next(signals).version for _ in range(5)] == [5, 6, 7, 8, 12]
        assert [request.after for request in played.requests] == [4, 6, 6, 8, 11]


def test_a_listener_that_has_heard_waits_for_a_server_as_long_as_it_waits_for_a_signal(database_url: str) -> None:
    with serving(database_url) as server:
        port = server.address
        with client_of(server, retry_s=0.0) as service:
            service.send_signal("a", 1)
            signals = service.listen_signal("me", "a", after=0, timeout=WITHIN_S)
            assert next(signals).version == 1
            server.stop()
            with ThreadPoolExecutor(1) as threads:
                heard = threads.submit(next, signals)
                assert not heard.done()
                with SignalServer(database_of(database_url), port, token=TOKEN) as again:
                    with client_of(again) as other:
                        other.send_signal("a", 2)
                    assert heard.result(WITHIN_S).version == 2
            signals.close()  # type: ignore[attr-defined]


def test_a_wrong_token_is_refused_by_each_call(database_url: str) -> None:
    with serving(database_url) as server, GrpcSignalService(server.address, "wrong") as service:
        for call in (
            lambda: service.send_signal("a"),
            lambda: service.list_signals("a"),
            lambda: service.listen_signal("me", "a"),
            lambda: next(service.listen_signal("me", "a", after=0)),
        ):
            with pytest.raises(SignalsRefused, match="the token is missing or wrong"):
                call()


def test_who_sends_and_for_which_run_is_seen_by_others(store: Store, query: Any, database_url: str) -> None:
    Tasks(store, query)
    with serving(database_url) as server, client_of(server, sender="flink") as service:
        assert service.send_signal("a", 1, run=("etl", "r1"), dedup="d").run == ("etl", "r1")
        service.send_signal("a", 2)
        first, second = service.list_signals("a")
        assert (first.run, first.sender, first.dedup) == (("etl", "r1"), "client flink", "d")
        assert (second.run, second.dedup) == (None, None)
        with pytest.raises(SignalsRefused, match="there is no run named 'r2' in the DAG etl"):
            service.send_signal("a", 1, run=("etl", "r2"))
        with pytest.raises(SignalsRefused, match="the sender"):
            client_of(server, sender="x" * 201).send_signal("a")


def test_a_listener_that_was_left_ends_its_call(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.signal_server.server.LISTENERS_MAX", 1)
    with serving(database_url) as server, client_of(server) as service:
        service.send_signal("a", 1)
        for _ in range(5):
            signals = service.listen_signal("me", "a", after=0)
            assert next(signals).version == 1
            del signals  # the next one finds its place free


class Clock:
    """The time of a listener, which passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("no link is lost here")


def test_a_timeout_that_ends_while_an_answer_is_under_way_loses_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with serving(database_url) as server, client_of(server) as service, client_of(server) as other:

        class SendsAtTheEnd(threading.Timer):
            """Its time is over at once, and at this moment something is sent."""

            def start(self) -> None:
                other.send_signal("a", "late", dedup="late")
                clock.now += self.interval
                self.function()

        monkeypatch.setattr(threading, "Timer", SendsAtTheEnd)
        monkeypatch.setattr(remote, "time", clock)
        monkeypatch.setattr(listening, "time", clock)
        assert [one.value for one in service.listen_signal("me", "a", after=0, timeout=10.0)] == ["late"]


# --- TLS ------------------------------------------------------------------------------------------


Identity = tuple[Path, bytes, bytes]


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """The file of a certificate for 127.0.0.1, that has signed itself, its key and itself."""
    return identity_in(tmp_path_factory.mktemp("tls"))


def identity_in(folder: Path, *, address: str = "127.0.0.1", days: int = 1) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headgate tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path = folder / "certificate.pem"
    path.write_bytes(pem)
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return path, key.private_bytes(*forms), pem


def test_over_tls_the_certificate_is_checked(database_url: str, identity: Identity) -> None:
    path, key, pem = identity
    key_path = path.with_name("key.pem")
    key_path.write_bytes(key)
    assert read_identity(path, key_path) == (key, pem)
    with pytest.raises(ServerRefused, match="are not PEM of a certificate and its key"):
        read_identity(path, path)
    with serving(database_url, identity=(key, pem)) as server:
        with client_of(server, certificate=path) as service:
            assert service.send_signal("a").version == 1
            assert next(service.listen_signal("me", "a", after=0)).version == 1
        with client_of(server, retry_s=0.0) as plain:
            with pytest.raises(
                SignalsUnavailable, match="the link is without TLS, and a server that has a certificate"
            ):
                plain.send_signal("a")


def repeated(_seconds: float) -> None:
    raise AssertionError("there is a pause before a call is repeated")


def refused_at_once(service: GrpcSignalService, problem: str) -> None:
    with service:
        calls: tuple[Callable[[], object], ...] = (
            lambda: service.send_signal("a"),
            lambda: next(service.listen_signal("me", "a", after=0)),
        )
        for call in calls:
            with pytest.raises(SignalsRefused) as refused:
                call()
            said = str(refused.value)
            assert said.startswith(f"no link to the server of signals at {service.target}: {problem}"), said


def test_tls_that_cannot_be_agreed_on_is_told_at_once(
    sqlite_url: str, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of gRPC are looked for: with a version that says it otherwise these calls are repeated in vain."""
    monkeypatch.setattr(time, "sleep", repeated)
    path, key, pem = identity
    others, expired = (tmp_path / name for name in ("others", "expired"))
    for folder in (others, expired):
        folder.mkdir()
    other_path, other_key, other_pem = identity_in(others, address="10.1.2.3")
    old_path, old_key, old_pem = identity_in(expired, days=-1)
    with serving(sqlite_url, identity=(key, pem)) as server:
        refused_at_once(
            client_of(server, certificate=other_path), "its certificate is not trusted (self signed certificate): "
        )
    with serving(sqlite_url, identity=(old_key, old_pem)) as server:
        refused_at_once(
            client_of(server, certificate=old_path), "its certificate is not trusted (certificate has expired): "
        )
    with serving(sqlite_url, identity=(other_key, other_pem)) as server:
        refused_at_once(client_of(server, certificate=other_path), "its certificate is for another host: ")
    with serving(sqlite_url) as server:
        refused_at_once(client_of(server, certificate=path), "it does not speak TLS: ")


def test_what_a_server_says_of_certificates_is_no_problem_of_the_link() -> None:
    says_so = failing(grpc.StatusCode.UNAVAILABLE, details="CERTIFICATE_VERIFY_FAILED, says the database")
    with playing() as (played, target), GrpcSignalService(target) as service:
        played.answers = [says_so, sent(1)]
        assert service.send_signal("a").version == 1


def test_to_other_machines_it_is_tls_unless_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    channel = grpc.insecure_channel("127.0.0.1:1")

    def noting(kind: str) -> Callable[..., grpc.Channel]:
        def make(*_: object) -> grpc.Channel:
            made.append(kind)
            return channel

        return make

    monkeypatch.setattr(grpc, "insecure_channel", noting("plain"))
    monkeypatch.setattr(grpc, "secure_channel", noting("TLS"))
    for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "signals.example.org:1", "10.0.0.1:1"):
        GrpcSignalService(target, TOKEN)
    GrpcSignalService("signals.example.org:1", TOKEN, plaintext=True)
    assert made == ["plain", "plain", "plain", "TLS", "TLS", "plain"]
    channel.close()


def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the token must be of printable ASCII"):
        GrpcSignalService("127.0.0.1:1", "ß")
    with pytest.raises(ValueError, match="give one of them"):
        GrpcSignalService("127.0.0.1:1", TOKEN, certificate=tmp_path / "x", plaintext=True)
    with pytest.raises(FileNotFoundError):
        GrpcSignalService("127.0.0.1:1", TOKEN, certificate=tmp_path / "x")
    for target in ("http://127.0.0.1:1", "", "127.0.0.1"):
        with pytest.raises(ValueError, match="the target must be HOST:PORT, not"):
            GrpcSignalService(target, TOKEN)
    (tmp_path / "x").write_text("no certificate")
    with pytest.raises(ValueError, match="has no certificate in the form of PEM"):
        GrpcSignalService("127.0.0.1:1", TOKEN, certificate=tmp_path / "x")
    with GrpcSignalService("127.0.0.1:1", TOKEN) as service:
        for run in ("ab", ("d",), ("d", 1), ["d", "r", "x"]):
            with pytest.raises(TypeError, match="run is a tuple of a dag_id and a run_id, not "):
                service.send_signal("a", run=run)  # type: ignore[arg-type]


def test_many_listeners_that_end_at_once_leave_the_link_as_it_was(sqlite_url: str) -> None:
    """A connection must not count calls that were cancelled as open ones: it would take no more of them, for ever."""
    with serving(sqlite_url) as server, client_of(server, retry_s=20.0) as service:
        for _ in range(8):
            heard = [service.listen_signal("me", "a", after=0) for _ in range(150)]
            service.send_signal("a", 1)
            for signals in heard:
                assert next(signals).version == 1
            del signals, heard  # their calls are cancelled
        assert service.send_signal("a", 2).version == 9
