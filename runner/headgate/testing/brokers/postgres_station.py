"""A private PostgreSQL server for conformance tests, and a table as a crash test sees it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.postgres_client import TROUBLE, PostgresClient
from headgate.brokers.postgres import PostgresOutboxTrigger
from headgate.testing.brokers.postgres_server import PREFIX, USER, as_user, find_binaries, give_to_user, make_data
from headgate.testing.brokers.station import CONNECTION, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap
from headgate.triggers.named_values import Connection

PASSWORD = "hunter22-of-the-station"
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
REQUESTS = (80_877_103, 80_877_104)  # what a client may ask for before it begins: TLS, GSSAPI
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = {port}
shared_buffers = 16MB
max_wal_size = 64MB
fsync = off
"""


class PostgresAckParser(AckParser):
    """Finds the ids of rows that are deleted or marked, in what a client sends."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = False
        self._is_ack: dict[bytes, bool] = {}  # by the name of the prepared statement

    def feed(self, data: bytes) -> list[str]:
        """Return the ids in the statements that are complete with these bytes."""
        self._rest += data
        found: list[str] = []
        while True:
            head = 1 if self._has_begun else 0
            if len(self._rest) < head + 4:
                return found
            size = int.from_bytes(self._rest[head : head + 4], "big") + head
            if len(self._rest) < size:
                return found
            message, self._rest = self._rest[:size], self._rest[size:]
            if not self._has_begun:
                self._has_begun = int.from_bytes(message[4:8], "big") not in REQUESTS
            elif message[:1] == b"P":
                name, statement, *_ = message[5:].split(b"\0")
                self._is_ack[name] = statement.startswith(b"WITH told")
            elif message[:1] == b"B":
                found += self._bound(message[5:])

    def _bound(self, body: bytes) -> list[str]:
        _, name, rest = body.split(b"\0", 2)
        if not self._is_ack.get(name):
            return []
        at = 2 + 2 * int.from_bytes(rest[:2], "big") + 2  # behind the formats and the number of parameters
        size = int.from_bytes(rest[at : at + 4], "big")
        return re.findall(r"[^{},\"]+", rest[at + 4 : at + 4 + size].decode())


class PostgresTable:
    """A table with a row for each message, as a crash test sees it."""

    def __init__(self, uri: str, table: str, *, condition: str = "true") -> None:
        self._connection = Connection.from_uri("station", uri)
        self._condition = condition  # of the rows that are not handled
        self._client: PostgresClient | None = None
        self.table = table

    def rows(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement; it is tried once more on a new connection if ours is gone."""
        for is_last in (False, True):
            try:
                if self._client is None:
                    self._client = PostgresClient(self._connection, "station")
                return self._client.rows(statement, parameters)
            except TROUBLE:
                self.close()
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def create(self) -> None:
        """Make the table."""
        self.rows(
            f"CREATE TABLE {self.table} (id bigserial PRIMARY KEY, payload jsonb, kind text, done_at timestamptz)"
        )

    def delete(self) -> None:
        """Drop it, with its ids."""
        self.rows(f"DROP TABLE {self.table}")

    def publish(self, messages: Sequence[str]) -> None:
        """Add a row for each name, all in one transaction."""
        insert = f"INSERT INTO {self.table} (payload) SELECT jsonb_build_object('message', name) "
        self.rows(f"{insert} FROM unnest(%(names)s::text[]) AS name", names=list(messages))

    def pending(self) -> list[str]:
        """Return the rows that are there."""
        return [payload for (payload,) in self.rows(f"SELECT payload::text FROM {self.table} WHERE {self._condition}")]

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class PostgresStation(Station):
    """A server with a password, and one table. Raises `headgate.testing.brokers.postgres_server.NoServer`."""

    table, rejected = "orders", "orders_rejected"

    def __init__(self) -> None:
        binaries = find_binaries()
        # Not in a folder of the test's: those are closed to whom the server runs as.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        password = self._folder / "password"
        password.write_text(PASSWORD)
        give_to_user(self._folder, password)
        self.data = make_data(self._folder, "--auth", "scram-sha-256", "--pwfile", str(password))
        self.port = free_port()
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(port=self.port))
        command = [*as_user(), str(binaries / "postgres"), "-D", str(self.data)]
        log = self._folder / "server.log"
        self.server = ServerProcess(command, port=self.port, log_path=log, is_ready=self._is_ready)
        direct = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        self.source = PostgresTable(direct, self.table)
        self.server.start()
        self.tap = Tap(("127.0.0.1", self.port), PostgresAckParser)

    def _is_ready(self) -> bool:
        """Whether it has started up; also one that refuses us has."""
        try:
            self.source.rows("SELECT 1")
        except BrokerMisconfigured:
            return True
        except TROUBLE:
            return False
        return True

    def listen_tls(self, certificate: Path, key: Path, clients: Path) -> None:
        """Restart it so that it takes clients with TLS only, and a certificate of the file ``clients`` each."""
        assert self.server is not None
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("ssl = on\n")
            for setting, path in {"ssl_cert_file": certificate, "ssl_key_file": key, "ssl_ca_file": clients}.items():
                copy = self.data / path.name
                copy.write_bytes(path.read_bytes())
                copy.chmod(0o600)
                give_to_user(copy)
                file.write(f"{setting} = '{copy}'\n")
        (self.data / "pg_hba.conf").write_text("hostssl all all all scram-sha-256 clientcert=verify-ca\n")
        self.server.close(signal.SIGINT)
        self.server.start()

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self._uri()

    def _uri(self, user: str = USER, password: str = PASSWORD, database: str = "postgres", query: str = "") -> str:
        # Without encryption, which the tap could not read.
        return f"postgresql://{user}:{password}@127.0.0.1:{self.tap.port}/{database}?sslmode=disable{query}"

    def trigger(self, **kwargs: Any) -> PostgresOutboxTrigger:
        """Return a trigger for the table."""
        given: dict[str, Any] = {"table": self.table, "message_bytes_max": SHORT_LIMIT_BYTES, **kwargs}
        return PostgresOutboxTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make the table."""
        self.source.create()

    def delete(self) -> None:
        """Drop the table."""
        self.source.delete()

    def publish(self, messages: Sequence[str]) -> None:
        """Add a row for each name."""
        self.source.publish(messages)

    def pending(self) -> list[str]:
        """Return the rows that are there."""
        return self.source.pending()

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to add a row that no filter may get."""
        insert = f"INSERT INTO {self.table} (payload) VALUES (jsonb_build_object('message', repeat('x', %(size)s)))"
        return {"too long": partial(self.source.rows, insert, size=SHORT_LIMIT_BYTES)}

    def with_place(self) -> Mapping[str, Any]:
        """Make a table for rejected rows, and return its name."""
        self.source.rows(f"CREATE TABLE IF NOT EXISTS {self.rejected} (LIKE {self.table})")
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the rows in it."""
        return [payload for (payload,) in self.source.rows(f"SELECT payload::text FROM {self.rejected} ORDER BY id")]

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; some of them need tables and users, which are made here."""
        for statement in (
            *(f"CREATE USER {user} PASSWORD '{PASSWORD}'" for user in ("reads", "deletes", "stranger")),
            "GRANT SELECT ON orders TO reads",
            "GRANT DELETE ON orders TO deletes",
            "CREATE TABLE keyless (id bigint, payload jsonb)",
            "CREATE TABLE pairs (id bigint, part int, payload jsonb, PRIMARY KEY (id, part))",
            "CREATE TABLE nullable (id bigint UNIQUE, payload jsonb)",
            "CREATE UNLOGGED TABLE volatile (id bigint PRIMARY KEY, payload jsonb)",
            "CREATE TABLE elsewhere (id bigint PRIMARY KEY)",
            "CREATE TABLE once (LIKE orders INCLUDING ALL)",
            "CREATE VIEW seen AS SELECT * FROM orders",
        ):
            self.source.rows(statement)
        wrong = "another-password-22"
        return {
            "wrong password": Refusal(self._uri(password=wrong), {}, "refuses access", wrong),
            "no such user": Refusal(self._uri(user="nobody"), {}, "refuses access", PASSWORD),
            "no such database": Refusal(self._uri(database="nothing"), {}, "refuses access", PASSWORD),
            "may not read": Refusal(self._uri(user="stranger"), {}, "refuses access", PASSWORD),
            "may not delete": Refusal(self._uri(user="reads"), {}, "refuses access", PASSWORD),
            "may only delete": Refusal(self._uri(user="deletes"), {}, "refuses access", PASSWORD),
            "may not mark": Refusal(self._uri(user="reads"), {"then": "set:done_at"}, "refuses access", PASSWORD),
            "no such table": Refusal(None, {"table": "nothing"}, "does not exist"),
            "no such schema": Refusal(None, {"table": "shop.orders"}, "does not exist"),
            "a view": Refusal(None, {"table": "seen"}, "must be a table"),
            "no key": Refusal(None, {"table": "keyless"}, "must be its primary key"),
            "half a key": Refusal(None, {"table": "pairs"}, "must be its primary key"),
            "a key that may be NULL": Refusal(None, {"table": "nullable"}, "must be its primary key"),
            "unlogged": Refusal(None, {"table": "volatile"}, "a crash of the server empties it"),
            "no such column": Refusal(None, {"body": "json:amount"}, "it has no column 'amount'"),
            "no time": Refusal(None, {"then": "set:kind"}, "must be a time or a boolean, and is text"),
            "no such place": Refusal(None, {"dead_letter": "nowhere"}, "dead_letter nowhere does not exist"),
            "a place of another shape": Refusal(None, {"dead_letter": "elsewhere"}, "has no column 'payload'"),
            "a place that takes a row once": Refusal(None, {"dead_letter": "once"}, "has the unique key once_pkey"),
            "no condition": Refusal(None, {"where": "kind ="}, "does not take a statement"),
            "another scheme": Refusal(self.uri.replace("postgresql:", "kafka:"), {}, "must begin with", PASSWORD),
            "an unknown option": Refusal(self._uri(query="&retries=5"), {}, "the option 'retries'", PASSWORD),
            "no TLS": Refusal(self.uri.replace("disable", "require"), {}, "does not support SSL", PASSWORD),
            "no file": Refusal(self._uri(query="&sslrootcert=/no"), {}, "sslrootcert /no cannot be read", PASSWORD),
        }

    def close(self) -> None:
        """End server, tap and our own connection."""
        self.source.close()
        self.tap.close()
        assert self.server is not None
        self.server.close(signal.SIGINT)  # a server that is killed leaves its shared memory behind
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
