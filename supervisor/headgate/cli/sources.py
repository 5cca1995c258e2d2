"""Sources of ``watchers add --from``: URIs that name a trigger of a broker and its kwargs, so that no Python is needed.

``redis://CONNECTION/STREAM?group=GROUP``: the name of a stored connection is in the place of the host, and the query
has further arguments of the trigger by their names. No secret belongs into a source: the kwargs of a watcher are shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from headgate.cli.invocation import CommandError

_FORM: Final = re.compile(r"(?P<scheme>[a-z]+)://(?P<connection>[^/?#]*)/(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?")


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
            "in_flight_max": int,
            "message_bytes_max": int,
        },
    ),
}


def parse_source(text: str) -> tuple[str, dict[str, Any]]:
    """Return the classpath and the kwargs that a source names. Raises `CommandError`, which shows no address.

    The trigger itself says whether the values can be used.
    """
    found = _FORM.fullmatch(text)
    if found is None or not found["connection"] or not found["path"]:
        raise _wrong("it must be SCHEME://CONNECTION/NAME?ARGUMENT=VALUE")
    if "@" in found["connection"] or ":" in found["connection"]:
        raise _wrong("it names a stored connection, not an address: see `headgate connections set`")
    source = SOURCES.get(found["scheme"])
    if source is None:
        raise _wrong(f"there is no source {found['scheme']}://; there is {', '.join(f'{name}://' for name in SOURCES)}")
    kwargs: dict[str, Any] = {"connection": unquote(found["connection"]), source.path: unquote(found["path"])}
    for name, value in parse_qsl(found["query"] or "", keep_blank_values=True):
        if name in kwargs:
            raise _wrong(f"it has {name!r} twice")
        kwargs[name] = _converted(source, name, value)
    for name in source.needed:
        if name not in kwargs:
            raise _wrong(f"it needs the argument {name!r}: ?{name}=...")
    return source.classpath, kwargs


def _converted(source: Source, name: str, value: str) -> Any:
    convert = source.arguments.get(name)
    if convert is None:
        near = difflib.get_close_matches(name, source.arguments, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else f" (there are {', '.join(source.arguments)})"
        raise _wrong(f"it has the unknown argument {name!r}{meant}")
    try:
        return convert(value)
    except ValueError as error:
        raise _wrong(f"the value of {name!r} cannot be used: {error}") from None


def _wrong(problem: str) -> CommandError:
    return CommandError(f"--from is no source: {problem}", exit_code=2)
