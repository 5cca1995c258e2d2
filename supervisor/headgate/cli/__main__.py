"""The entry point of ``headgate``, and of ``python -m headgate.cli``.

It imports little before it has set the handlers of signals, because the imports take most of the time of a start.
"""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

# A command imports most of what it needs once it runs, and nearly all of that stays; with the default thresholds the
# collector walked it again and again, for a fifth of the time of most commands.
GC_THRESHOLDS = (50_000, 20, 100)
SUPERVISORS = frozenset({"up", "triggerer"})
SERVERS = SUPERVISORS | {"web", "serve"}  # the commands that run until they are asked to stop


def run() -> int:
    """Run the command line; return the exit code."""
    if not SUPERVISORS.isdisjoint(sys.argv[1:]):
        # Asked to stop before anything has begun: that is a complete drain. `headgate.supervisor.arbiter` sets its own
        # handlers later.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
    if SERVERS.isdisjoint(sys.argv[1:]):
        gc.set_threshold(*GC_THRESHOLDS)
    from headgate.protocol.startup import without_collections

    with without_collections():
        from headgate.cli.main import main

    return main()


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run())
