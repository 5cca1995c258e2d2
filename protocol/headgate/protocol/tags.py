"""The form of tagged values, which JSON has none for, and the numbers among them; `headgate.protocol.values` has all.

Numbers are read here because signals are compared with them by who makes no other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Final

TAG: Final = "$"
CONTENT: Final = "v"
NUMBER_CHARS_MAX: Final = 5_000  # of a number that is compared: with all of a signal's it would take tenths of a second


def tagged(tag: str, content: Any) -> dict[str, Any]:
    """Return JSON that stands for a value of the type ``tag``."""
    return {TAG: tag, CONTENT: content}


def text_of(content: Any) -> str:
    """Return the content of a tag that has text. Raises ValueError for any other."""
    if type(content) is not str:
        raise ValueError("it is not a str")
    return content


def _decimal_of(content: Any) -> Decimal:
    try:
        return Decimal(text_of(content))
    except InvalidOperation:
        raise ValueError(f"{content!r:.80} is not a decimal number") from None


# Each reads the content of its tag, and raises ValueError.
NUMBERS: Final[dict[str, Callable[[Any], int | float | Decimal]]] = {
    "decimal": _decimal_of,
    "float": lambda content: float(text_of(content)),
    "int": lambda content: int(text_of(content), 16),
}


def _written_number(value: Any) -> tuple[str, str] | None:
    """Return the tag and the text of a number that JSON does not hold; None for all else."""
    if type(value) is not dict or value.keys() != {TAG, CONTENT}:
        return None
    tag, content = value[TAG], value[CONTENT]
    return (tag, content) if type(tag) is str and tag in NUMBERS and type(content) is str else None


def is_long_number(value: Any) -> bool:
    """Whether decoded JSON stands for a number that is too long to be compared."""
    written = _written_number(value)
    return written is not None and len(written[1]) > NUMBER_CHARS_MAX


def number_of(value: Any) -> int | float | Decimal | None:
    """Return the number that decoded JSON stands for, to be compared with others; None for all else.

    True and False are no numbers, NaN is none, and one of more than `NUMBER_CHARS_MAX` characters is not looked at.
    """
    if (written := _written_number(value)) is not None:
        tag, text = written
        if len(text) > NUMBER_CHARS_MAX:
            return None
        try:
            value = NUMBERS[tag](text)
        except ValueError:
            return None
    if type(value) is int:
        return value
    if type(value) is float:
        return None if math.isnan(value) else value
    return value if type(value) is Decimal and not value.is_nan() else None
