"""Bodies of messages: what the event has of one, and the key of a message that only its publisher can name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from headgate.protocol.encoded_values import is_nested_deeper, object_of
from headgate.triggers.shared_stream import Undecodable

BODIES: Final = ("text", "json", "bytes")
KEY_CHARS_MAX: Final = 400  # an event's key has room for its position among those of one message, too
LEVELS_MAX: Final = 90  # of JSON; with what is around it, an event may have `headgate.protocol.values.DEPTH_MAX`
PLACE_CHARS_MAX: Final = 300  # of these; of a longer place the key has the beginning and a digest


def decoded_body(body: bytes, kind: str) -> Any:
    """Return a body as one of `BODIES`; an `Undecodable`, which is whole, if it is not that."""
    if kind == "bytes":
        return body
    try:
        return body.decode() if kind == "text" else parsed_json(body)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Undecodable(f"the body is not UTF-8: {error.reason}", body)
    except (ValueError, RecursionError) as error:
        return Undecodable(f"the body is not JSON: {error}", body)


def event_of(body: Any, rest: Mapping[str, Any]) -> Any:
    """Return the event of a message: its body, as `decoded_body` has returned it, and the rest of it.

    Of an `Undecodable` body it is one of the whole message: a dead letter that had its body alone would lose the rest.
    """
    if isinstance(body, Undecodable):
        return body._replace(content={"body": body.content, **rest})
    return {"body": body, **rest}


def parsed_json(body: bytes) -> Any:
    """Return the value of a JSON text in UTF-8, of which nothing is lost and which can be stored.

    A number that no float holds exactly is a Decimal. Raises ValueError, also for ``NaN``, for a lone surrogate, for an
    object with a name twice and for more than `LEVELS_MAX` levels, and RecursionError.
    """
    text = body.decode("utf-8-sig")
    value = _JSON.decode(text)
    if "\\u" in text:  # also the halves of a character may be written so
        json.dumps(value, ensure_ascii=False, default=str).encode()
    if text.count("[") + text.count("{") > LEVELS_MAX and is_nested_deeper(value, LEVELS_MAX):
        raise ValueError(f"it is nested deeper than {LEVELS_MAX} levels")
    return value


def _exact(text: str) -> float | Decimal:
    try:
        exact = Decimal(text)
    except ArithmeticError:
        raise ValueError("it has a number beyond all limits") from None
    near = float(text)
    return near if Decimal(repr(near)) == exact else exact


def _no_number(text: str) -> None:
    raise ValueError(f"it has {text}, which is no value of JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=object_of, parse_float=_exact, parse_constant=_no_number)


def field_of(body: bytes, name: str) -> str | int | None:
    """Return a field of a JSON object if it is a text or a number; None if there is none."""
    try:
        found = parsed_json(body)
    except (ValueError, RecursionError):
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def readable(data: bytes) -> str | bytes:
    """Return the text that these bytes are in UTF-8; if they are none, themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return values by their names, those of one name joined by ``", "``."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def message_key(place: str, name: object, body: bytes) -> str | None:
    """Return the key of a message that its publisher has given a name; None if it has not.

    The content belongs to it: a publisher that gives all messages one name loses none that differ. ``place`` is
    ``KIND:REST``, and quoted so that no other place and name make the same key.
    """
    if name is None or name == "":
        return None
    content = hashlib.blake2b(body, digest_size=8).hexdigest()
    kind, _, rest = place.partition(":")
    place = f"{kind}:{rest.replace('%', '%25').replace(':', '%3A')}"
    if len(place) > PLACE_CHARS_MAX:
        place = f"{place[:200]}:{_digest(place)}"
    key = f"{place}:{name}:{content}"
    if len(key) > KEY_CHARS_MAX:
        key = f"{place}:{_digest(str(name))}:{content}"
    return key


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
