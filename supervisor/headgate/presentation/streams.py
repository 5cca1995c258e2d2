"""How far a stream is behind, and who holds it up, as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headgate.presentation.moments import age

HOLDERS_SHOWN = 3  # triggers, in a line


def lag_text(lag: int | None, unit: str) -> str | None:
    """Return how far a stream is behind, in ``unit``: messages, bytes, or a word of a newer version.

    None if that is not known.
    """
    if lag is None:
        return None
    if unit == "messages":
        return f"{lag:,}"
    if unit != "bytes":
        return f"{lag:,} {unit}"
    amount, shown = float(lag), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, shown = amount / 1024, larger
    return f"{amount:,.0f} {shown}"


def hold_text(held: str | None, since: datetime | None, names: Sequence[str]) -> str | None:
    """Return why a stream pulls nothing, for which triggers, and since when; None if it does."""
    if held is None:
        return None
    shown = ", ".join(names[:HOLDERS_SHOWN]) + (", ..." if len(names) > HOLDERS_SHOWN else "")
    why = f"{held}{'' if since is None else f', {age(since)}'}"
    return f"{shown} ({why})" if shown else why
