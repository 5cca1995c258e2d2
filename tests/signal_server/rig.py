"""A server of signals in this process, bare calls to it, and a database that is away for a while."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import grpc
import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url
from tests.postgres import url_for_tests
from tests.waiting import WITHIN_S

from headgate.protocol import signal_rpc
from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server.server import SignalServer
from headgate.signals.remote import GrpcSignalService
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database

TOKEN = "the token of the tests"
_END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
METADATA = ((signal_rpc.AUTHORIZATION, signal_rpc.BEARER + TOKEN),)


def database_of(url: str) -> Database:
    """Return the database as the server opens it."""
    return Database(open_engine(url), Secrets.none(), None)


@contextmanager
def serving(url: str, **options: Any) -> Generator[SignalServer]:
    """Serve a database on a free port."""
    with SignalServer(database_of(url), "127.0.0.1:0", **{"token": TOKEN, **options}) as server:
        yield server


def client_of(server: SignalServer, **options: Any) -> GrpcSignalService:
    return GrpcSignalService(server.address, TOKEN, **options)


class Bare:
    """The calls, as a program in another language makes them."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),))

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def send(self, *signals: pb.NewSignal, metadata: Any = METADATA, **fields: Any) -> list[tuple[int, bool]]:
        call = self.channel.unary_unary(signal_rpc.SEND, pb.SendRequest.SerializeToString, pb.SendResponse.FromString)
        answer = call(pb.SendRequest(signals=signals, **fields), metadata=metadata, timeout=WITHIN_S)
        return [(one.version, one.is_new) for one in answer.sent]

    def list(self, key: str, metadata: Any = METADATA, **fields: Any) -> list[pb.Signal]:
        call = self.channel.unary_unary(signal_rpc.LIST, pb.ListRequest.SerializeToString, pb.ListResponse.FromString)
        return list(call(pb.ListRequest(key=key, **fields), metadata=metadata, timeout=WITHIN_S).signals)

    def listen(self, key: str, metadata: Any = METADATA, **fields: Any) -> Any:
        call = self.channel.unary_stream(
            signal_rpc.LISTEN, pb.ListenRequest.SerializeToString, pb.ListenResponse.FromString
        )
        return call(pb.ListenRequest(key=key, **fields), metadata=metadata)

    def say(self, method: str, data: bytes, metadata: Any = METADATA) -> bytes:
        """Call with these bytes; return those of the first answer."""
        call: Any = self.channel.unary_stream(method)
        answer: bytes = next(call(data, metadata=metadata, timeout=WITHIN_S))
        return answer


def status_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the status code and the details with which a call fails."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    assert isinstance(failed.value, grpc.Call)
    return failed.value.code().name, failed.value.details()


@contextmanager
def away(url: str) -> Generator[None]:
    """Have the database away for those who write; of PostgreSQL for everyone."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        with open_engine(url).begin():
            yield
        return
    name = sql.Identifier(str(parsed.database))
    with psycopg.connect(url_for_tests(), autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        try:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [parsed.database]
            )
            yield
        finally:
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
