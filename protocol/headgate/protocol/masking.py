"""Masking of secrets: a value that a process received is replaced by ``***`` in everything it writes later (I12).

A secret is searched for in its likely forms: as it is, quoted for a URL, as JSON and Python write it, in base64 alone
and within a longer text (as in HTTP's Basic authentication), and line by line if it has several lines. A secret of
fewer than ``SECRET_CHARS_MIN`` characters is not searched for: it would match by chance in many lines, and masking it
there would reveal it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, quote_plus

from headgate.protocol.messages.queries import GetConnection, GetVariable, Query, QueryResult, SecretText
from headgate.protocol.uris import parse_uri

MASK: Final = "***"
SECRET_CHARS_MIN: Final = 6
# Forms searched for in each line. Each line costs a search for each form, so beyond this number, or this number of
# characters, the oldest are dropped. Those of one secret always fit.
FORMS_MAX: Final = 20_000
FORMS_CHARS_MAX: Final = 32 * 1024 * 1024
MEMBERS_MAX: Final = 200  # texts within one secret that is JSON, or has several lines


class SecretMask:
    """The secrets that a process has received. May be used by several threads."""

    def __init__(self) -> None:
        self._forms: dict[str, None] = {}  # the oldest first
        self._longest_first: tuple[tuple[str, bytes], ...] = ()

    def __repr__(self) -> str:
        return f"<SecretMask with {len(self._forms)} forms>"

    def __bool__(self) -> bool:
        return bool(self._longest_first)

    def note(self, query: Query, result: QueryResult) -> None:
        """Add the result of a query, if it is a secret."""
        match query, result:
            case GetVariable(), SecretText(value=str() as text):
                self.add(text)
            case GetConnection(), SecretText(value=str() as uri):
                self.add_connection(uri)
            case _:
                pass

    def add(self, secret: str) -> None:
        """Add a secret; if it is JSON, the texts in it are secrets as well."""
        self._add([secret, *_texts_in(secret)])

    def add_connection(self, uri: str) -> None:
        """Add a connection: its URI, its password, its token, and the values of its query."""
        try:
            parts = parse_uri(uri)
        except ValueError:
            self._add([uri])  # the code that requested it gets an error, and no part of it
        else:
            self._add([uri, parts.password, parts.token, *parts.extra.values()])

    def hide(self, text: str) -> str:
        """Return the text with ``***`` in the place of every secret, the longest first."""
        for form, _ in self._longest_first:
            if form in text:
                text = text.replace(form, MASK)
        return text

    def hide_in_bytes(self, line: bytes) -> bytes:
        """Return a line of output, of whatever encoding, without secrets."""
        for _, form in self._longest_first:
            if form in line:
                line = line.replace(form, MASK.encode())
        return line

    def begun_at_end(self, data: bytes) -> int:
        """Return how many of the last bytes may be the beginning of a secret, whose rest is yet to come."""
        forms = self._longest_first
        if not forms:
            return 0
        by_first: dict[int, list[bytes]] = {}
        for _, form in forms:
            by_first.setdefault(form[0], []).append(form)
        for begin in range(max(0, len(data) - len(forms[0][1])), len(data)):
            end = data[begin:]
            if any(len(form) > len(end) and form.startswith(end) for form in by_first.get(data[begin], ())):
                return len(end)
        return 0

    @contextmanager
    def apart(self) -> Generator[None]:
        """Start empty inside the block, and restore the former secrets at its end: for tests."""
        before, self._forms, self._longest_first = (self._forms, self._longest_first), {}, ()
        try:
            yield
        finally:
            self._forms, self._longest_first = before

    def _add(self, secrets: list[str]) -> None:
        for secret in secrets:
            for form in _forms_of(secret):
                self._forms.pop(form, None)
                self._forms[form] = None
        chars = 0
        for number, form in enumerate(reversed(list(self._forms)), 1):
            chars += len(form)
            if number > FORMS_MAX or chars > FORMS_CHARS_MAX:
                self._forms.pop(form, None)
        # Repeat if another thread has added one meanwhile, so that the last thread here has seen all of them.
        while True:
            forms = list(self._forms)
            ordered = sorted(forms, key=len, reverse=True)
            self._longest_first = tuple((form, form.encode("utf-8", "surrogatepass")) for form in ordered)
            if len(self._forms) == len(forms):
                return


def _forms_of(secret: str) -> set[str]:
    """Return the forms in which a secret may be written."""
    whole = [secret, *secret.splitlines()[:MEMBERS_MAX]]
    forms: set[str] = set()
    for text in [part.strip() for part in whole]:
        if len(text) < SECRET_CHARS_MIN:
            continue
        encoded = text.encode("utf-8", "surrogatepass")
        forms |= {text, repr(text)[1:-1], repr(encoded)[2:-1], json.dumps(text)[1:-1]}
        forms |= {json.dumps(text, ensure_ascii=False)[1:-1], quote(encoded)}
        forms |= {quote(encoded, safe=""), quote_plus(encoded), ascii(text)[1:-1]}
        forms |= _base64_forms(encoded)
    return forms


def _base64_forms(data: bytes) -> set[str]:
    """Return the characters of base64 that depend on ``data`` alone, for each place it may have within a longer text.

    Three bytes become four characters, so there are three cases; the characters at both ends may have bits of others.
    """
    forms: set[str] = set()
    for before in range(3):
        first, last = -(-before * 8 // 6), (before + len(data)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            form = encode(bytes(before) + data + bytes(2))[first:last].decode()
            if len(form) >= SECRET_CHARS_MIN:
                forms.add(form)
    return forms


def _texts_in(secret: str) -> list[str]:
    """Return the texts in a secret that is a JSON object or array, ``MEMBERS_MAX`` at most."""
    if not secret.lstrip().startswith(("{", "[")):
        return []
    try:
        value = json.loads(secret)
    except (ValueError, RecursionError):
        return []
    return [text for text, _ in zip(_leaves(value), range(MEMBERS_MAX), strict=False)]


def _leaves(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
