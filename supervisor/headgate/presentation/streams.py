"""How far a stream is behind, and who holds it up, as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.presentation.moments import age

if TYPE_CHECKING:
    from headgate.store.inspect.streams import LiveStream

HOLDERS_SHOWN = 3  # triggers, in a line


def lag_text(live: LiveStream | None) -> str | None:
    """Return how far a stream is behind: in messages, bytes, or a word of a newer version; None if it is not known."""
    if live is None or live.lag is None:
        return None
    lag, unit = live.lag, live.lag_unit
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


def hold_text(live: LiveStream | None) -> str | None:
    """Return why a stream pulls nothing, for which triggers, and since when; None if it does, or nothing is known."""
    if live is None or live.held is None:
        return None
    names = live.held_by
    shown = ", ".join(names[:HOLDERS_SHOWN]) + (", ..." if len(names) > HOLDERS_SHOWN else "")
    why = f"{live.held}{'' if live.held_since is None else f', {age(live.held_since)}'}"
    return f"{shown} ({why})" if shown else why
