"""Positions of brokers, and what is wrong with them, as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.protocol.messages.runner import Position
    from headgate.scheduling.drift import Finding


def position_text(position: Position | None) -> str | None:
    """Return a position as its broker writes it; None if it is not known."""
    if position is None:
        return None
    return "-".join(map(str, position)) or "nothing"


def finding_text(finding: Finding) -> str:
    """Return what was found of a lane, in one line."""
    lane = f"lane {finding.lane}: " if finding.lane else ""
    if finding.verdict == "dropped unread":
        return f"{lane}{finding.verdict}, {finding.missing:,} at most"
    return f"{lane}{finding.verdict}, from {position_text(finding.was)} to {position_text(finding.now)}"
