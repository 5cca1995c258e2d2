"""The entry point of ``headgate``, and of ``python -m headgate.cli``.

It imports little before it has set the handlers of signals, because the imports take most of the time of a start.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

SUPERVISORS = frozenset({"up", "triggerer"})  # the commands that run until they are asked to stop


def run() -> int:
    """Run the command line; return the exit code."""
    if not SUPERVISORS.isdisjoint(sys.argv[1:]):
        # Asked to stop before anything has begun: that is a complete drain. `headgate.supervisor.arbiter` sets its own
        # handlers later.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
    from headgate.protocol.startup import without_collections

    with without_collections():
        from headgate.cli.main import main

    return main()


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run())
