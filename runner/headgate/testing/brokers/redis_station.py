"""A private Redis server for conformance tests, and Redis streams as a crash test sees them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from headgate.brokers.clients.redis_client import run
from headgate.brokers.redis_streams import RedisStreamTrigger
from headgate.testing.brokers.station import CONNECTION, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap

SERVERS = ("redis-server", "valkey-server")
PASSWORD = "hunter22-of-the-station"
PENDING_MAX = 1_000_000  # entries in one answer
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers


def find_server() -> str | None:
    """Return the path of a server of Redis or Valkey; None if this machine has none."""
    return next((path for path in map(shutil.which, SERVERS) if path is not None), None)


class RedisAckParser(AckParser):
    """Finds the ids of `XACK` in what a client sends. Commands are arrays of byte strings, with their lengths."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the ids of the commands that are complete with these bytes."""
        self._rest += data
        found: list[str] = []
        while (command := self._next_command()) is not None:
            if command and command[0].upper() == b"XACK":
                found += [part.decode() for part in command[3:] if part != b"0-0"]  # that one is a question
        return found

    def _next_command(self) -> list[bytes] | None:
        head, end, _ = self._rest.partition(b"\r\n")
        if not end:
            return None
        at, parts = len(head) + 2, []
        for _ in range(int(head[1:])):
            line_end = self._rest.find(b"\r\n", at)
            if line_end < 0:
                return None
            size = int(self._rest[at + 1 : line_end])
            at = line_end + 2 + size + 2
            if at > len(self._rest):
                return None
            parts.append(self._rest[at - 2 - size : at - 2])
        self._rest = self._rest[at:]
        return parts


class RedisStream:
    """A stream that one group reads, as a crash test sees it: ``crash_test(trigger, RedisStream(client, ...))``."""

    def __init__(self, client: redis.Redis, stream: str, group: str) -> None:
        self._client = client
        self._stream = stream
        self._group = group

    def create(self) -> None:
        """Make the stream, and the group at its beginning."""
        run(self._client, "XGROUP", "CREATE", self._stream, self._group, "0", "MKSTREAM")

    def delete(self) -> None:
        """Delete the stream with its groups."""
        run(self._client, "DEL", self._stream)

    def publish(self, messages: Sequence[str]) -> None:
        """Add an entry for each name."""
        for message in messages:
            run(self._client, "XADD", self._stream, "*", "message", message)

    def pending(self) -> list[str]:
        """Return the entries that the group has not got, and those that it has not acknowledged."""
        group = next(each for each in self._client.xinfo_groups(self._stream) if each["name"] == self._group.encode())
        last = group["last-delivered-id"].decode()
        held = self._client.xpending_range(self._stream, self._group, "-", "+", PENDING_MAX)
        ids = {each["message_id"] for each in held}
        entries = run(self._client, "XRANGE", self._stream, "-", "+")
        new = {entry_id for entry_id, _ in run(self._client, "XRANGE", self._stream, f"({last}", "+")}
        return [repr(fields) for entry_id, fields in entries if entry_id in ids or entry_id in new]


class RedisStation(Station):
    """A server with a password and an append-only file, one stream and one group. ``server_path``: `find_server`."""

    stream, group, rejected = "orders", "accounting", "orders-rejected"

    def __init__(self, folder: Path, server_path: str) -> None:
        self._port = free_port()
        self.server = ServerProcess(
            [
                *(server_path, "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always", "--requirepass", PASSWORD),
            ],
            port=self._port,
            log_path=folder / "redis.log",
        )
        self.server.start()
        self.tap = Tap(("127.0.0.1", self._port), RedisAckParser)
        self.client = redis.Redis(port=self._port, password=PASSWORD, protocol=2)
        self._source = RedisStream(self.client, self.stream, self.group)

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self._uri()

    def _uri(self, user: str = "", password: str = PASSWORD, port: int | None = None, path: str = "") -> str:
        return f"redis://{user}:{password}@127.0.0.1:{port or self.tap.port}{path}"

    def trigger(self, **kwargs: Any) -> RedisStreamTrigger:
        """Return a trigger for the stream."""
        given: dict[str, Any] = {
            "stream": self.stream,
            "group": self.group,
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return RedisStreamTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make stream and group."""
        self._source.create()

    def delete(self) -> None:
        """Delete the stream."""
        self._source.delete()

    def publish(self, messages: Sequence[str]) -> None:
        """Add an entry for each name."""
        self._source.publish(messages)

    def pending(self) -> list[str]:
        """Return the entries of the group that are not acknowledged."""
        return self._source.pending()

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to add entries that no filter may get."""
        return {
            "too long": lambda: self._add("x" * SHORT_LIMIT_BYTES),
            "too many bytes of names": lambda: run(self.client, "XADD", self.stream, "*", "n" * 64_000, ""),
            "not UTF-8": lambda: self._add(b"\xff\xfe"),
        }

    def _add(self, value: str | bytes) -> None:
        run(self.client, "XADD", self.stream, "*", "message", value)

    def with_place(self) -> Mapping[str, Any]:
        """Return the name of a stream for rejected entries."""
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the entries in it."""
        return [repr(fields) for _, fields in run(self.client, "XRANGE", self.rejected, "-", "+")]

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; those of permissions make users on the server, of which each lacks one command."""
        for user, rights in {
            "reads": "+xreadgroup +xinfo +type +ttl +ping",
            "acks": "+xack +xinfo +type +ttl +ping",
            "elsewhere": "+@all",
        }.items():
            keys = "~other" if user == "elsewhere" else "~*"
            run(self.client, "ACL", "SETUSER", user, "on", f">{PASSWORD}", keys, *rights.split())
        run(self.client, "SET", "a-text", "x")
        run(self.client, "XADD", "expiring", "*", "a", "b")
        run(self.client, "EXPIRE", "expiring", 10_000)
        wrong = "another-password-22"
        return {
            "wrong password": Refusal(self._uri(password=wrong), {}, "refuses access", wrong),
            "no such user": Refusal(self._uri(user="nobody"), {}, "refuses access", PASSWORD),
            "no password": Refusal(f"redis://127.0.0.1:{self.tap.port}", {}, "refuses access"),
            "may not acknowledge": Refusal(self._uri(user="reads"), {}, "xack", PASSWORD),
            "may not read": Refusal(self._uri(user="acks"), {}, "xreadgroup", PASSWORD),
            "may not use the stream": Refusal(self._uri(user="elsewhere"), {}, "refuses access", PASSWORD),
            "no such stream": Refusal(None, {"stream": "nothing"}, "there is no such stream"),
            "no such group": Refusal(None, {"group": "nobody"}, "there is no such group"),
            "no stream": Refusal(None, {"stream": "a-text"}, "there is a string under that name"),
            "a stream that expires": Refusal(None, {"stream": "expiring"}, "the stream expires"),
            "another scheme": Refusal(self.uri.replace("redis:", "kafka:"), {}, "must begin with redis://", PASSWORD),
            "an unknown option": Refusal(self.uri + "?retries=5", {}, "the option 'retries'", PASSWORD),
            "an option of TLS": Refusal(self.uri + "?ssl_check_hostname=true", {}, "options of TLS", PASSWORD),
            "no number of a database": Refusal(self._uri(path="/orders"), {}, "the number of the database", PASSWORD),
            "a database that is not there": Refusal(self._uri(path="/999"), {}, "DB index is out of range", PASSWORD),
        }

    def close(self) -> None:
        """End server, tap and our own client."""
        self.client.close()
        super().close()
