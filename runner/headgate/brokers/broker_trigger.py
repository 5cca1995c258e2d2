"""`BrokerTrigger`: the base of triggers that read a broker by a `headgate.brokers.checked.CheckedProducer`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.checked import CheckedProducer
from headgate.child.error_text import describe_error
from headgate.protocol.messages.checks import BrokerChecked
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.named_values import Connection

NAME_CHARS_MAX: Final = 256  # of a stream, a queue, a group: with an id they fit the key of an event


class BrokerTrigger(BaseEventTrigger):
    """Fires an event for every message. A subclass of it has a constructor that names all arguments, by keyword too.

    It gives them to this one by `arguments_of`. They are those of ``producer`` as well, and values with a stored form;
    no secret is among them, which is what the stored connection ``connection`` is for. ``place`` are the arguments by
    which the broker remembers a place: triggers that agree in them share a reader, and the further values given by the
    first apply to all of them.
    """

    producer: ClassVar[type[CheckedProducer]]
    scheme: ClassVar[str]  # of `headgate watchers add --from`
    place: ClassVar[tuple[str, ...]]

    def __init__(self, **kwargs: Any) -> None:
        for name, annotation in self._arguments().items():
            if name in kwargs and isinstance(annotation, str):  # an adapter elsewhere may have classes
                check_type(name, kwargs[name], annotation)
        check_name("connection", kwargs["connection"])
        self.producer(**kwargs)  # refuses what cannot be used at once
        self._kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class of this instance, so that a subclass is restored as itself."""
        return self._classpath(), dict(self._kwargs)

    def shared_stream_key(self) -> tuple[str, ...]:
        """Return what the broker remembers its place by, and where."""
        return (self.scheme, *(self._kwargs[name] for name in self.place))

    def check(self, uri: str) -> BrokerChecked:
        """Connect by the URI of a connection, look at the source, and leave; no message is taken."""
        producer = self.create_shared_stream_producer(self._kwargs)
        lag, problem = None, ""
        try:
            producer.connection = Connection.from_uri(self._kwargs["connection"], uri)
            producer.look()
            lag = producer.lag()
        except Exception as error:
            is_told = isinstance(error, BrokerMisconfigured | ValueError)
            problem = str(error) if is_told else f"{producer.name}: {describe_error(error)[0]}"
        finally:
            with contextlib.suppress(Exception):  # the answer does not depend on how it is left
                producer.disconnect()
        return BrokerChecked(producer.name, problem, tuple(producer.warnings), lag)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> CheckedProducer:
        """Return the producer; kwargs that only a user's subclass knows are ignored."""
        return cls.producer(**cls.shared_stream_arguments(kwargs))

    @classmethod
    def shared_stream_arguments(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all but those that only a user's subclass knows."""
        names = cls._arguments()
        return {name: value for name, value in kwargs.items() if name in names}

    @classmethod
    def _arguments(cls) -> dict[str, object]:
        """Return the arguments of the adapter, each with its annotation."""
        adapter = next(each for each in cls.__mro__ if "producer" in vars(each))
        annotations = dict(vars(adapter)["__init__"].__annotations__)
        annotations.pop("return", None)
        return annotations


def arguments_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor out of its ``locals()``, before it has set others, in their order."""
    return {name: value for name, value in variables.items() if name not in ("self", "__class__")}


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}


def check_type(what: str, value: object, annotation: str) -> None:
    """Raise TypeError, which names ``what``, unless a value is of one of the simple types that its annotation names."""
    allowed = tuple(kind for part in annotation.split(" | ") for kind in _TYPES.get(part, (object,)))
    # To Python, True is an int, and the text "false" is true.
    is_flag = isinstance(value, bool) and bool not in allowed and object not in allowed
    if is_flag or not isinstance(value, allowed):
        kind = annotation.replace(" | ", " or ")
        raise TypeError(f"{what} must be {'an' if kind == 'int' else 'a'} {kind}, not {type(value).__name__}")


def check_name(what: str, text: object, chars_max: int = NAME_CHARS_MAX) -> None:
    """Raise TypeError or ValueError, which name ``what``, unless ``text`` may be the name of something."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    if not 0 < len(text) <= chars_max or not text.isprintable():
        raise ValueError(f"{what} must have 1..{chars_max} printable characters, not {text[:chars_max]!r}")


def check_names(**given: object) -> None:
    """Check those of these names that are given, each as `check_name`."""
    for what, text in given.items():
        if text is not None:
            check_name(what, text)


def check_choice(what: str, text: object, words: tuple[str, ...], prefixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless ``text`` is one of these words, or one of the prefixes with a name behind it."""
    is_named = isinstance(text, str) and any(text.startswith(each) and len(text) > len(each) for each in prefixes)
    if text not in words and not is_named:
        known = [f'"{word}"' for word in (*words, *(f"{prefix}FIELD" for prefix in prefixes))]
        raise ValueError(
            f"{what} must be {', '.join(known[:-1])}{' or ' if known[1:] else ''}{known[-1]}, not {text!r}"
        )
