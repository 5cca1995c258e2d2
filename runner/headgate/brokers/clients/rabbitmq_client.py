"""Connections to RabbitMQ from stored ones, what its errors mean to a producer, and what a queue's arguments are.

``amqp://login:password@host:5672/vhost``, and ``amqps://`` for TLS (port 5671); without a path the virtual host is
``/``. In the query: ``heartbeat`` (seconds), ``auth=external`` (the login is that of the client's certificate), and the
options of `headgate.brokers.clients.connecting`. Several hosts are tried in order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.connecting import ask_for_refusal, certificate_error, check_connection, tls_context
from headgate.triggers.named_values import Connection

try:
    import pika
    from pika import exceptions
    from pika.credentials import ExternalCredentials, PlainCredentials

    from headgate.brokers.clients.rabbitmq_frames import UNREAD, ReadingConnection
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "RabbitMQ needs the client pika: pip install 'headgate[rabbitmq]'", name="pika"
    ) from missing

__all__ = [
    "REFUSED",
    "TROUBLE",
    "UNREAD",
    "UNROUTABLE",
    "BasicProperties",
    "Deliver",
    "RabbitChannel",
    "RabbitConnection",
    "RabbitPasses",
    "open_connection",
    "queue_arguments",
    "translated",
]

# The client has no types that hold: the annotations that it has contradict what it takes.
RabbitConnection: TypeAlias = Any  # a pika.BlockingConnection
RabbitChannel: TypeAlias = Any  # one of its channels
BasicProperties: TypeAlias = Any  # pika.BasicProperties
Deliver: TypeAlias = Any  # pika.spec.Basic.Deliver
REFUSED: Final = exceptions.NackError
UNROUTABLE: Final = exceptions.UnroutableError

SCHEMES: Final = {"amqp": False, "amqps": True}
OPTIONS: Final = ("heartbeat", "auth")
PORT, TLS_PORT = 5672, 5671
SOCKET_TIMEOUT_S: Final = 5.0
STACK_TIMEOUT_S: Final = 10.0  # for TCP, TLS and the handshake of AMQP together
BLOCKED_TIMEOUT_S: Final = 10.0  # for which a broker that is short of memory or disk may hold up a publish
HEARTBEAT_S: Final = 20
HEARTBEAT_S_MAX: Final = 3_600
ANSWER_S: Final = 20.0  # for one answer, a confirmation too: a broker that gives none is left, heartbeats or not
PROBES_MAX: Final = 10  # declarations to find out the arguments of a queue

TROUBLE: Final = (exceptions.AMQPError, OSError)
_MISSING: Final = (404,)
_REFUSED: Final = (403, 530)  # no permission; no such virtual host, or not for this user
_DOWN: Final = ("is down or inaccessible", "process is stopped", "failed to perform operation", "timeout", "timed out")
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for queue .*?: received .*? but current is "
    r"(?:the value )?(?:'(?P<value>.*?)'|(?P<none>none))(?: of type '(?P<type>\w+)')?$"
)
_GUARD: Final = "x-dead-letter-exchange"
_RESET: Final = "Expected connected socket"

# It writes errors of its own, with tracebacks, about what is raised as well, and logged by the producer.
logging.getLogger("pika").setLevel(logging.CRITICAL)


class RabbitPasses(ConnectionError):
    """The broker refuses something for now; among `TROUBLE`."""


_Blocking: Any = pika.BlockingConnection  # whose annotations do not hold


class _Connection(_Blocking):  # type: ignore[misc]
    """A connection that does not wait for ever for an answer, as pika does while the broker answers heartbeats."""

    _looks_for_s = 0.0

    def process_data_events(self, time_limit: float = 0.0) -> None:
        """Look for what has come, for so long, which is no wait for an answer."""
        self._looks_for_s = time_limit
        try:
            super().process_data_events(time_limit)
        finally:
            self._looks_for_s = 0.0

    def _flush_output(self, *waiters: Any) -> None:
        """Close the connection, and raise `RabbitPasses`, if this takes longer than `ANSWER_S`; all calls wait here."""
        if self.is_closed:
            super()._flush_output(*waiters)  # raises
            return
        # By the means of pika's own limit for a broker that blocks publishers.
        error = RabbitPasses(f"the broker has not answered for {ANSWER_S:g} s")
        end = partial(self._impl._terminate_stream, error)
        timer = self._impl._adapter_call_later(ANSWER_S + self._looks_for_s, end)
        try:
            super()._flush_output(*waiters)
        finally:
            self._impl._adapter_remove_timeout(timer)


def open_connection(connection: Connection, name: str) -> RabbitConnection:
    """Return a connection to the first host that answers. ``name`` is shown in the broker's list of connections.

    Raises `BrokerMisconfigured` for a connection that cannot be used, and what `translated` raises.
    """
    options = _options(connection, name)
    where = f"rabbitmq connection {connection.name!r}"
    failure: Exception | None = None
    for host, port in connection.hosts or (("localhost", None),):
        host, port = host or "localhost", port or options["port"]
        given: dict[str, Any] = options | {"host": host, "port": port}
        if (context := options["ssl_options"]) is not None:
            given["ssl_options"] = pika.SSLOptions(context, host)
        try:
            with translated(where):
                return _Connection(pika.ConnectionParameters(**given), ReadingConnection)
        except TROUBLE as error:
            failure = error
            if context is not None:
                ask_for_refusal(connection, where, host, port)
    assert failure is not None
    raise failure


def _options(connection: Connection, name: str) -> dict[str, Any]:
    where = f"the connection {connection.name!r}"
    check_connection(connection, SCHEMES, OPTIONS)
    heartbeat = connection.extra.get("heartbeat", str(HEARTBEAT_S))
    if not (heartbeat.isascii() and heartbeat.isdigit() and 0 < int(heartbeat) <= HEARTBEAT_S_MAX):
        raise BrokerMisconfigured(f"{where}: heartbeat must be 1..{HEARTBEAT_S_MAX:,} seconds, not {heartbeat!r}")
    auth = connection.extra.get("auth", "plain")
    if auth not in ("plain", "external"):
        raise BrokerMisconfigured(f"{where}: auth must be plain or external, not {auth!r}")
    if auth == "external" and "ssl_certfile" not in connection.extra:
        raise BrokerMisconfigured(f"{where}: auth=external needs amqps:// and an ssl_certfile, which names the user")
    is_tls = SCHEMES[connection.scheme]
    plain = PlainCredentials(connection.login or "guest", connection.password if connection.login else "guest")
    return {
        "port": TLS_PORT if is_tls else PORT,
        "virtual_host": connection.schema or "/",
        "credentials": ExternalCredentials() if auth == "external" else plain,
        "ssl_options": tls_context(connection) if is_tls else None,
        "heartbeat": int(heartbeat),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "stack_timeout": STACK_TIMEOUT_S,
        "blocked_connection_timeout": BLOCKED_TIMEOUT_S,
        # The producer connects again, and knows what that means for what it holds.
        "connection_attempts": 1,
        "client_properties": {"connection_name": f"headgate {name}"},
    }


@contextmanager
def translated(name: str) -> Generator[None]:
    """Raise what the client raises as `BrokerMisconfigured` or `RabbitPasses`, whichever it is."""
    try:
        yield
    except (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError) as error:
        raise BrokerMisconfigured(f"{name}: the broker refuses access: {_text(error)}") from None
    except exceptions.ProbableAccessDeniedError as error:
        raise BrokerMisconfigured(f"{name}: the broker refuses access to the virtual host: {_text(error)}") from None
    except (exceptions.ChannelClosedByBroker, exceptions.ConnectionClosedByBroker) as error:
        text = str(error.reply_text)
        if any(word in text for word in _DOWN):
            raise RabbitPasses(f"{error.reply_code}: {text}") from error
        if error.reply_code in _REFUSED:
            raise BrokerMisconfigured(f"{name}: the broker refuses access: {text}") from None
        if error.reply_code in _MISSING:
            raise BrokerSourceMissing(f"{name}: it does not exist (any more): {text}") from None
        raise RabbitPasses(f"{error.reply_code}: {text}") from error
    except (exceptions.AMQPConnectionError, OSError) as error:
        if (refusal := certificate_error(error)) is not None:
            raise BrokerMisconfigured(f"{name}: {refusal}") from None
        if not str(error):
            raise RabbitPasses(str(_innermost(error))) from None
        raise
    except ValueError as error:
        # pika says so of a connection that is reset between its making and pika's next look at it.
        if _RESET not in str(error):
            raise
        raise RabbitPasses(str(error)) from None
    except (exceptions.ShortStringTooLong, exceptions.UnsupportedAMQPFieldException) as error:
        raise BrokerError(f"{name}: {_text(error)}") from None


def _innermost(error: BaseException) -> BaseException:
    """Return the error that has the reason: pika's own have it as ``exception``, or among their arguments."""
    inner = next(
        (part for part in (getattr(error, "exception", None), *error.args) if isinstance(part, Exception)), None
    )
    return error if inner is None else _innermost(inner)


def _text(error: BaseException) -> str:
    found: list[str] = [str(part) for part in error.args if part]
    return ", ".join(found) or type(error).__name__


def queue_arguments(connection: RabbitConnection, queue: str) -> dict[str, Any] | None:
    """Return what of a queue's properties its broker tells; None if this user may not ask.

    ``durable``, ``auto_delete``, and the arguments up to ``x-dead-letter-exchange`` (None: not given as an argument; a
    policy may have given it). AMQP has no such question: the queue is declared with that argument of a type that no
    broker takes, so the declaration never succeeds, and never makes a queue; the refusals tell one property each.
    Raises what `translated` does not know of.
    """
    known: dict[str, Any] = {"durable": True, "auto_delete": False}
    for _ in range(PROBES_MAX):
        arguments = {name: value for name, value in known.items() if name.startswith("x-")}
        channel = connection.channel()
        try:
            channel.queue_declare(
                queue, durable=known["durable"], auto_delete=known["auto_delete"], arguments={**arguments, _GUARD: 1}
            )
        except exceptions.ChannelClosedByBroker as refused:
            found = _INEQUIVALENT.search(str(refused.reply_text))
            if found is None:
                return None
            name, value = found["name"], found["value"]
            if name == _GUARD:
                return {**known, _GUARD: None if found["none"] else value}
            if name in known and name.startswith("x-"):
                return None  # it does not take its own value
            if name in ("durable", "auto_delete"):
                known[name] = value == "true"
            else:
                known[name] = int(value) if value and value.lstrip("-").isdigit() else value
        else:
            channel.close()
            return known if known.get("x-queue-type") == "stream" else None  # a stream does not look at the guard
    return None
