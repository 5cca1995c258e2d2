"""The task worker: ``python -P -m headgate.worker``. Only the supervisor starts it."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from typing import NoReturn

from headgate.child.forks import cut_off_forks
from headgate.child.parent_death import die_with
from headgate.protocol.startup import import_structlog, without_collections

EXIT_BUG = 70  # an unexpected exception escaped; the traceback is on standard error


def main() -> NoReturn:
    """Run until the supervisor closes the link or ends this process, and end it with the exit code."""
    arguments = _parse(sys.argv[1:])
    die_with(arguments.supervisor_pid)
    # Ctrl-C is for the supervisor, which ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)  # only the crashed thread: the supervisor keeps little of the last output
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Not inheritable: a process that a task starts must not keep the link open.
    os.set_inheritable(arguments.frames_fd, False)
    os.set_inheritable(arguments.logs_fd, False)
    cut_off_forks(arguments.frames_fd)  # the records of a fork belong to its step
    with without_collections():
        import_structlog()
        from headgate.child.logs import configure
        from headgate.worker.output import RecordSocket
        from headgate.worker.session import run
        from headgate.worker.stops import Stops

    stops = Stops()
    channel = RecordSocket(socket.socket(fileno=arguments.logs_fd), stops)
    configure(channel)
    try:
        code = run(socket.socket(fileno=arguments.frames_fd), channel, stops)
    except BaseException:
        # In the pipe of standard error the supervisor looks for the cause of a death.
        traceback.print_exc(file=sys.__stderr__)
        code = EXIT_BUG
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not a normal exit: a thread that a step left behind must not keep this process alive.
    os._exit(code)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headgate.worker", description=__doc__)
    parser.add_argument("--frames-fd", type=int, required=True)
    parser.add_argument("--logs-fd", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
