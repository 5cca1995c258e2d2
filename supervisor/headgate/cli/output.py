"""Values as commands print them: JSON for programs, and stored payloads made readable."""

from __future__ import annotations

import sys
from typing import Any

from headgate.presentation.values import json_line, payload, readable

__all__ = ["console", "json_line", "payload", "readable"]


def console(*, stderr: bool = False) -> Any:
    """Return a rich console. If the output is not a terminal, no line is wrapped, so that it can be searched."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 10_000, highlight=False, soft_wrap=False)
