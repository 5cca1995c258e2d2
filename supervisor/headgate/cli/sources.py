"""Sources of ``watchers add --from``: URIs that name a trigger of a broker and its kwargs, so that no Python is needed.

``redis://CONNECTION/STREAM?group=GROUP``: the name of a stored connection is in the place of the host, and the query
has further arguments of the trigger by their names. A source has no fragment: ``#`` is a character of the path, which
MQTT needs. No secret belongs into a source: the kwargs of a watcher are shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from headgate.cli.invocation import CommandError

_FORM: Final = re.compile(r"(?P<scheme>[a-z]+)://(?P<connection>[^/?#]*)/(?P<path>[^?]*)(?:\?(?P<query>[^#]*))?")


class Source(NamedTuple):
    """A trigger: its class, the argument that the path of the URI gives, and those of the query with their types."""

    classpath: str
    path: str
    needed: tuple[str, ...]
    arguments: Mapping[str, Callable[[str], Any]]


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _name_or_none(text: str) -> str | None:
    return None if text == "none" else text


_LIMITS: Final[Mapping[str, Callable[[str], Any]]] = {"in_flight_max": int, "message_bytes_max": int}

SOURCES: Final[Mapping[str, Source]] = {
    "redis": Source(
        "headgate.brokers.redis_streams.RedisStreamTrigger",
        "stream",
        ("group",),
        {
            "group": str,
            "consumer": str,
            "create": _flag,
            "body": str,
            "lane": str,
            "dead_letter": str,
            "claim_idle_s": float,
            **_LIMITS,
        },
    ),
    "nats": Source(
        "headgate.brokers.nats.JetStreamTrigger",
        "stream",
        ("durable",),
        {
            "durable": str,
            "create": _flag,
            "subject": str,
            "body": str,
            "lane": str,
            "dead_letter": str,
            "accept_drop": _flag,
            **_LIMITS,
        },
    ),
    "kafka": Source(
        "headgate.brokers.kafka.KafkaTrigger",
        "topic",
        ("group",),
        {
            **dict.fromkeys(("group", "start", "on_offset_lost", "body", "dead_letter", "instance"), str),
            **_LIMITS,
        },
    ),
    "postgres": Source(
        "headgate.brokers.postgres.PostgresOutboxTrigger",
        "table",
        (),
        {
            **dict.fromkeys(("id", "body", "lane", "then", "where", "notify", "reader", "dead_letter"), str),
            "accept_drop": _flag,
            **_LIMITS,
        },
    ),
    "rabbitmq": Source(
        "headgate.brokers.rabbitmq.RabbitTrigger",
        "queue",
        (),
        {
            "key": _name_or_none,
            "body": str,
            "lane": str,
            "dead_letter": str,
            "dead_letter_exchange": str,
            "accept_drop": _flag,
            **_LIMITS,
        },
    ),
    "sqs": Source(
        "headgate.brokers.sqs.SqsTrigger",
        "queue",
        (),
        {
            "account": str,
            "body": str,
            "visibility_s": int,
            "dead_letter": str,
            "accept_drop": _flag,
            **_LIMITS,
        },
    ),
    "mqtt": Source(
        "headgate.brokers.mqtt.MqttTrigger",
        "topic",
        ("client_id",),
        {
            "client_id": str,
            "group": str,
            "key": _name_or_none,
            "body": str,
            "lane": str,
            "dead_letter": str,
            "session_expiry_s": int,
            "accept_drop": _flag,
            **_LIMITS,
        },
    ),
    "webhook": Source(
        "headgate.brokers.webhooks.WebhookTrigger",
        "path",
        ("verify",),
        {
            "verify": str,
            "key": _name_or_none,
            "body": str,
            "headers": str,
            "tolerance_s": float,
            "answer_within_s": float,
            **_LIMITS,
        },
    ),
}
# Schemes of connections of the same brokers.
_MEANT: Final = {
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "postgresql": "postgres",
    "rediss": "redis",
    "tls": "nats",
    "mqtts": "mqtt",
    "http": "webhook",
    "https": "webhook",
}


def parse_source(text: str, what: str = "--from") -> tuple[str, dict[str, Any]]:
    """Return the classpath and the kwargs that a source names, which the user has given as ``what``.

    The trigger itself says whether the values can be used. Raises `CommandError`, which shows no address.
    """
    try:
        return _parsed(text)
    except ValueError as error:
        raise CommandError(f"{what} is no source: {error}", exit_code=2) from None


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    found = _FORM.fullmatch(text)
    if found is None or not found["connection"] or not found["path"]:
        raise ValueError("it must be SCHEME://CONNECTION/NAME?ARGUMENT=VALUE")
    if "@" in found["connection"] or ":" in found["connection"]:
        raise ValueError("it names a stored connection, not an address: see `headgate connections set`")
    source = SOURCES.get(found["scheme"])
    if source is None:
        known = ", ".join(f"{name}://" for name in SOURCES)
        meant = _MEANT.get(found["scheme"])
        more = f"there are {known}" if meant is None else f"did you mean {meant}://? A source names its connection"
        raise ValueError(f"there is no source {found['scheme']}://; {more}")
    kwargs: dict[str, Any] = {"connection": unquote(found["connection"]), source.path: unquote(found["path"])}
    for name, value in parse_qsl(found["query"] or "", keep_blank_values=True):
        if name in kwargs:
            raise ValueError(f"it has {name!r} twice")
        kwargs[name] = _converted(source, name, value)
    for name in source.needed:
        if name not in kwargs:
            raise ValueError(f"it needs the argument {name!r}: ?{name}=...")
    return source.classpath, kwargs


def _converted(source: Source, name: str, value: str) -> Any:
    convert = source.arguments.get(name)
    if convert is None:
        near = difflib.get_close_matches(name, source.arguments, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else f" (there are {', '.join(source.arguments)})"
        raise ValueError(f"it has the unknown argument {name!r}{meant}")
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"the value of {name!r} cannot be used: {error}") from None
