"""Names that people give to runs: those that every command takes, and that a page has an address for."""

from __future__ import annotations

import re

_RUN_ID = re.compile(r"[A-Za-z0-9_.~:+@=-]+")


def run_id(text: str) -> str:
    """Return a name for a new run. Raises `ValueError`, which says why it cannot be one."""
    if text == "latest":
        raise ValueError("`latest` means the newest run in every other command")
    if _RUN_ID.fullmatch(text) is None:
        raise ValueError(
            "expected letters, digits and _ . ~ : + @ = -" + (f", got {text!r}" if text else "; it is empty")
        )
    if text in (".", ".."):
        raise ValueError(f"{text!r} has another meaning in the address of a page")
    return text
