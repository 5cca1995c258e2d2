"""The text of an exception that users' code raised: fit to be sent, stored and shown."""

from __future__ import annotations

import traceback

from headgate.child.queries import secrets
from headgate.protocol.errors import sentence_of
from headgate.protocol.messages.runner import ERROR_CHARS_MAX


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the error in one sentence and its traceback, both fit to be stored, for any exception class.

    Both go to the database, to logs and to captures, so the secrets that this process knows are masked in them (I12).
    """
    text, trace = secrets.hide(sentence_of(error)), secrets.hide(traceback_of(error))
    # Cut the end of the sentence and the beginning of the traceback: what is left matters most.
    return storable(text[:ERROR_CHARS_MAX])[:ERROR_CHARS_MAX], storable(trace[-ERROR_CHARS_MAX:])[-ERROR_CHARS_MAX:]


def traceback_of(error: BaseException) -> str:
    """Return the traceback as Python prints it, for any exception class."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as exc:  # an author's exception may fail in its own __str__
        return f"the traceback cannot be shown: formatting it raised {type(exc).__name__}"


def storable(text: str) -> str:
    """Return the text with the characters that no database stores (NUL, lone surrogates) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
