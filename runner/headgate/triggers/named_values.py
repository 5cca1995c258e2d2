"""Variables and connections: texts that users store under names, for tasks and triggers to read.

A task reads them with `Variable.get` and `Connection.get`, a trigger with its own ``await self.get_variable(name)`` and
``await self.get_connection(name)``. Either way the supervisor looks in its environment first, then in its database.
Texts of six characters or more that were read are replaced by ``***`` in everything the process logs afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Unpack

from headgate.child import queries
from headgate.protocol.messages.queries import GetConnection, GetVariable, QueryResult, SecretText
from headgate.protocol.uris import parse_uri
from headgate.triggers.airflow_names import VARIABLES, NoOptions

__all__ = ["Connection", "ConnectionMissing", "Variable", "VariableMissing"]


class _Required:
    def __repr__(self) -> str:
        return "<no default>"


REQUIRED: Final = _Required()  # means that no default was given, because None may be one


class VariableMissing(LookupError):
    """There is no variable of this name, and no default was given."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no variable {name!r}: set it with headgate variables set, or in the supervisor's environment as "
            f"HEADGATE_VAR_{name.upper()}"
        )
        self.name = name


class ConnectionMissing(LookupError):
    """There is no connection of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no connection {name!r}: set it with headgate connections set, or in the supervisor's "
            f"environment as HEADGATE_CONN_{name.upper()}"
        )
        self.name = name


class _NamesOfAirflow(type):
    def __getattr__(cls, name: str) -> NoReturn:
        instead = f": {VARIABLES[name]}" if name in VARIABLES else ""
        raise AttributeError(f"Variable has no attribute {name!r}{instead}", name=name, obj=cls)


class Variable(metaclass=_NamesOfAirflow):
    """Texts stored under names. Read while a step of a task runs, not while the DAG file is parsed."""

    @staticmethod
    def get(name: str, default: Any = REQUIRED, **unknown: Unpack[NoOptions]) -> Any:
        """Return the text of a variable, or ``default`` if there is none.

        Raises `VariableMissing` if there is no default either; from `headgate.child.queries`, `NoQueryHandler` and
        `QueryFailed`.
        """
        for option in unknown:
            instead = f": {VARIABLES[option]}" if option in VARIABLES else ""
            raise TypeError(f"Variable.get has no argument {option!r}{instead}")
        return variable_text(name, queries.send_query(GetVariable(name)), default)

    @staticmethod
    def get_json(name: str, default: Any = REQUIRED) -> Any:
        """Return a variable's text decoded from JSON; ``default``, as it is, if there is no variable.

        Raises as `get` does, and ValueError for a text that is not JSON.
        """
        return variable_json(name, queries.send_query(GetVariable(name)), default)


@dataclass(frozen=True)
class Connection:
    """The address and credentials of a service: a URI and its parts, decoded.

    ``scheme://login:password@host:port/schema?key=value``; a missing part is '' (``port``: None).
    ``extra`` are the keys of the query. Of several hosts (``h1:9092,h2:9092``) ``hosts`` has all as pairs of host and
    port, and ``host`` and ``port`` are the first. Neither repr nor logs show password, extra and the URI itself,
    nor a login without a password, which may be a token; repr shows no login at all.
    """

    name: str
    scheme: str
    host: str
    port: int | None
    login: str = field(repr=False)
    password: str = field(repr=False)
    schema: str
    extra: dict[str, str] = field(repr=False)
    uri: str = field(repr=False)
    hosts: tuple[tuple[str, int | None], ...] = ()

    @classmethod
    def get(cls, name: str) -> Connection:
        """Return the connection of this name.

        Raises `ConnectionMissing`, ValueError for a stored text that is not a URI, and from `headgate.child.queries`
        `NoQueryHandler` and `QueryFailed`.
        """
        return connection_of(name, queries.send_query(GetConnection(name)))

    @classmethod
    def from_uri(cls, name: str, uri: str) -> Connection:
        """Return the connection that a URI describes. Raises ValueError, which does not show the URI."""
        try:
            parts = parse_uri(uri)
        except ValueError as error:
            raise ValueError(f"the connection {name!r} cannot be read: {error}") from None
        return cls(
            name=name,
            scheme=parts.scheme,
            host=parts.host,
            port=parts.port,
            login=parts.login,
            password=parts.password,
            schema=parts.schema,
            extra=parts.extra,
            uri=uri,
            hosts=parts.hosts,
        )


# --- from an answer to a value, for tasks and triggers alike ----------------------------------------


def variable_text(name: str, answered: QueryResult, default: Any) -> Any:
    """Return the text in an answer, or ``default``. Raises `VariableMissing`."""
    text = _text_in(answered)
    if text is None and isinstance(default, _Required):
        raise VariableMissing(name)
    return default if text is None else text


def variable_json(name: str, answered: QueryResult, default: Any) -> Any:
    """Return the text in an answer decoded from JSON, or ``default``. Raises `VariableMissing` and ValueError."""
    if _text_in(answered) is None:
        return variable_text(name, answered, default)
    try:
        return json.loads(variable_text(name, answered, default))
    except ValueError as error:
        # The error's own attributes hold the text, so it is not chained.
        where = f": line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        problem = f"the variable {name!r} is not JSON{where}"
    raise ValueError(problem)


def connection_of(name: str, answered: QueryResult) -> Connection:
    """Return the connection in an answer. Raises `ConnectionMissing` and ValueError."""
    uri = _text_in(answered)
    if uri is None:
        raise ConnectionMissing(name)
    return Connection.from_uri(name, uri)


def _text_in(answered: QueryResult) -> str | None:
    if not isinstance(answered, SecretText):
        raise queries.QueryFailed(f"the supervisor answered with {type(answered).__name__}, not with a text")
    return answered.value
