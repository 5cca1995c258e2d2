"""Connections to Redis (or Valkey) from stored ones, and what their errors mean to a producer.

``redis://login:password@host:6379/0``, and ``rediss://`` for TLS, with the options of
`headgate.brokers.clients.connecting` in the query. Several hosts are tried in order, and the first that is a master is
used.

The client makes no attempt of its own to repeat a command: a repeated ``XREADGROUP`` whose first answer was lost would
leave the messages of that answer pending without anybody knowing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.bodies import readable
from headgate.brokers.clients.connecting import (
    ask_for_refusal,
    certificate_error,
    check_connection,
    checks_host,
    tls_files,
)
from headgate.triggers.named_values import Connection

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.client import Pipeline
    from redis.credentials import CredentialProvider
    from redis.retry import Retry
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "Redis needs the client redis-py: pip install 'headgate[redis]'", name="redis"
    ) from missing

Fields = Sequence[tuple[bytes, bytes]]  # of an entry, as the server has them: a name may come more than once
Part = TypeVar("Part")

RedisClient = redis.Redis
RedisPipeline = Pipeline
WatchError = exceptions.WatchError

SOCKET_TIMEOUT_S: Final = 5.0  # for one answer, beside the wait of a blocking read: a server that hangs is left
PORT: Final = 6379
SCHEMES: Final = {"redis": False, "rediss": True}
DATABASE_MAX: Final = 10_000  # its number; a server has 16 by default

# What ends a connection only. What the server refuses does not pass by connecting anew, but for these.
TROUBLE: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
_PASSING: Final = (
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
# Of these redis-py makes dicts, which have one value of a field that an entry has twice.
_UNCONVERTED: Final = ("XREADGROUP", "XAUTOCLAIM", "XRANGE")
_PASSING_TEXTS: Final = ("BUSY ", "MISCONF ", "NOREPLICAS ")


class _Credentials(CredentialProvider):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, behind the name of the user if there is one."""
        login, password = self._connection.login, self._connection.password
        return (login, password) if login else (password,)


class RedisPasses(redis.ConnectionError):
    """The server refuses commands for now; among `TROUBLE`."""


class RedisFull(RedisPasses):
    """The server has no memory for what is added; what is read and acknowledged needs none."""


def open_client(connection: Connection) -> redis.Redis:
    """Return a client of the first host that answers and is a master.

    Raises `BrokerMisconfigured` for a connection that cannot be used, and what `translated` raises.
    """
    options = _client_options(connection)
    where = f"redis connection {connection.name!r}"
    failure: Exception | None = None
    for host, port in connection.hosts or (("localhost", None),):
        host, port = host or "localhost", port or PORT
        client: redis.Redis | None = None
        try:
            with translated(where):
                client = redis.Redis(host=host, port=port, **options)  # it connects
                client.ping()
                info = ask(client, "INFO", "replication")
            for command in _UNCONVERTED:
                client.set_response_callback(command, _as_it_is)
            if info is None or info.get("role", "master") == "master":
                opened, client = client, None
                return opened
            failure = RedisPasses(f"{host} is a replica")
        except TROUBLE as error:
            failure = error
            if SCHEMES[connection.scheme]:
                ask_for_refusal(connection, where, host, port)
        finally:
            if client is not None:
                client.close()
    assert failure is not None
    raise failure


def run(client: redis.Redis, *command: str | bytes | int) -> Any:
    """Return the answer to a command; redis-py converts it as it does for this command, but for `_UNCONVERTED`."""
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


def _as_it_is(answer: Any, **_: Any) -> Any:
    return answer


def ask(client: redis.Redis, *command: str) -> Any:
    """Return the answer to a question about the server; None if the user of the connection may not ask."""
    try:
        return run(client, *command)
    except exceptions.NoPermissionError:
        return None


@contextmanager
def translated(name: str) -> Generator[None]:
    """Raise what the client raises as `BrokerMisconfigured` or `BrokerError`, if trying again would not help."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise BrokerMisconfigured(f"{name}: the server refuses access: {error}") from None
    except redis.ResponseError as error:
        text = str(error)
        if isinstance(error, exceptions.OutOfMemoryError):
            raise RedisFull(text) from error
        if isinstance(error, _PASSING) or text.startswith(_PASSING_TEXTS):
            raise RedisPasses(text) from error
        if text.startswith("DB index"):
            raise BrokerMisconfigured(f"{name}: the server has no database of this number: {text}") from None
        if text.startswith(("NOGROUP", "UNBLOCKED", "no such key")):
            raise BrokerSourceMissing(f"{name}: the stream or the group does not exist (any more): {text}") from None
        if text.startswith("WRONGTYPE"):
            raise BrokerMisconfigured(f"{name}: there is a value under that name, and it is not a stream") from None
        raise BrokerError(f"{name}: {text}") from error
    except redis.ConnectionError as error:
        if (refusal := certificate_error(error)) is not None:
            raise BrokerMisconfigured(f"{name}: {refusal}") from None
        raise


def _client_options(connection: Connection) -> dict[str, Any]:
    where = f"the connection {connection.name!r}"
    check_connection(connection, SCHEMES)
    database = connection.schema or "0"
    if not (database.isascii() and database.isdigit() and int(database) <= DATABASE_MAX):
        raise BrokerMisconfigured(f"{where}: the number of the database must be 0..{DATABASE_MAX:,}, not {database!r}")
    options: dict[str, Any] = {
        "db": int(database),
        # As an object: a traceback that shows local variables would show a password.
        "credential_provider": _Credentials(connection) if connection.password else None,
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        # A pool would replace a connection that is lost without saying so. Pipelines take another one than the rest.
        "single_connection_client": True,
        "max_connections": 2,
        "driver_info": None,
    }
    if connection.scheme == "rediss":
        options |= {"ssl": True, "ssl_check_hostname": checks_host(connection), **tls_files(connection)}
    return options


# --- entries of streams -----------------------------------------------------------------------------


def fields_as_they_are(fields: Fields) -> dict[Any, Any]:
    """Return an entry as a dead letter has it: what is not UTF-8 is bytes, so that two that differ are told apart."""
    return named_fields((readable(name), readable(value)) for name, value in fields)


def named_fields(fields: Iterable[tuple[Part, Part]]) -> dict[Part, Part | list[Part]]:
    """Return fields by their names: a value, or all values of one that comes more than once."""
    found: dict[Part, list[Part]] = {}
    for name, value in fields:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def pairs_of(parts: Sequence[bytes] | None) -> Fields:
    """Return the names and values of an entry, which the server sends in turns; none of one that is gone."""
    return list(zip(parts[::2], parts[1::2], strict=True)) if parts else ()
