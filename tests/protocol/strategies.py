"""What a struct of the wire can hold, for hypothesis."""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for everything a field of this type can hold on the wire."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        return st.integers(-(2**63), 2**64 - 1)
    if hint is float:
        return st.floats(allow_nan=False)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy_of(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(strategy_of(argument) for argument in arguments))
    if origin is tuple:
        return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: _struct(hint))  # it may hold structs of its own type
    return st.from_type(hint)


@cache
def _struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: strategy_of(hint) for name, hint in typing.get_type_hints(kind).items()})
