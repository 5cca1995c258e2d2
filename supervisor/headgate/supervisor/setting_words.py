"""Types of settings in words, for errors and lists."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import msgspec


def in_words(kind: msgspec.inspect.Type) -> str:
    """Describe the values of a type: ``a whole number from 1``, ``one of auto, human, json``."""
    inspect = msgspec.inspect
    match kind:
        case inspect.Metadata():
            return in_words(kind.type)
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            least = f"above {kind.gt:g}" if kind.gt is not None else f"from {kind.ge}"
            return f"{noun} {least} to {kind.le:,.0f}" if kind.le is not None else f"{noun} {least}"
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
        case inspect.VarTupleType():
            return "a list of names" + (" (at least one)" if kind.min_length else "")
        case inspect.CustomType():
            return "a path"
        case inspect.UnionType():
            return in_words(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(pattern=str()):
            return "a URL such as sqlite:////folder/file.db or postgresql://user@host/name"
        case _:
            return "text"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown name: the known one that may have been meant."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `headgate config show` lists them all"
