"""Instances that begin in their trigger: which argument of the trigger is the value of the instance.

No worker makes the operator of such an instance before its trigger has fired. So it is made once when the file is
parsed, with a `LaterValue` in the place of the value: where that is an argument of the trigger as it is, the supervisor
sets the value of each instance. Whatever else a constructor does with it raises, because only a worker could do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from headgate.protocol.messages.start_triggers import OwnArguments, OwnSource


class LaterValue:
    """Stands for an argument of an operator that there is not yet.

    ``source`` says where the supervisor finds it; None if only a worker does. Raises TypeError where an object has a
    truth, equals another one or has a text, whatever it is; other operations raise that anyway.
    """

    encode_hint = ", which only a worker knows more of: the value of an instance can only be a whole argument"

    def __init__(self, name: str, source: OwnSource | None = None) -> None:
        self._name = name
        self.source = source

    def __repr__(self) -> str:
        return f"<the value of {self._name!r}>"

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"{self!r} is not known before its step")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __format__ = _refuse


def own_arguments(kwargs: Mapping[str, Any]) -> OwnArguments | None:
    """Return which of the arguments of a start trigger each instance has of its own; None if there are none."""
    own = {
        name: value.source
        for name, value in kwargs.items()
        if isinstance(value, LaterValue) and value.source is not None
    }
    return OwnArguments(tuple(own), next(iter(own.values()))) if own else None
