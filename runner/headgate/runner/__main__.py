"""The trigger runner: ``python -P -m headgate.runner``, started by the supervisor only."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from typing import NoReturn

from headgate.child.forks import cut_off_forks
from headgate.child.parent_death import die_with
from headgate.protocol.startup import import_structlog, without_collections

SWITCH_INTERVAL_S = 0.001  # at the default of 5 ms two busy threads can starve each other for seconds
# trio makes many short-lived, cycle-free objects; the default thresholds doubled its cost per event.
GC_THRESHOLDS = (50_000, 20, 100)
EXIT_BUG = 70  # an exception that should have been handled; its traceback is on standard error


def main() -> NoReturn:
    """Run until the supervisor drains this process or is gone, and end the process with the exit code."""
    arguments = _parse(sys.argv[1:])
    die_with(arguments.supervisor_pid)
    # On Ctrl-C the supervisor drains this process through the link; the terminal's signal must not interrupt that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    # Not inherited: a process that a trigger starts must not keep the link open.
    os.set_inheritable(arguments.frames_fd, False)
    os.set_inheritable(arguments.logs_fd, False)
    cut_off_forks(arguments.frames_fd, arguments.logs_fd)
    with without_collections():
        import_structlog()
        from headgate.child.logs import LogChannel, configure
        from headgate.child.output import capture_output, end_lines
        from headgate.runner.black_box import BlackBox
        from headgate.runner.forks import end_forks_of_the_loop
        from headgate.runner.session import run

    channel = LogChannel(socket.socket(fileno=arguments.logs_fd))
    standard_output, standard_error = sys.stdout, sys.stderr

    def exit_process(code: int) -> NoReturn:
        # Not a normal exit, because a thread that a trigger left behind must not keep this process alive.
        end_lines()
        channel.close()
        with contextlib.suppress(OSError, ValueError):
            standard_output.flush()
            standard_error.flush()
        os._exit(code)

    configure(channel)
    capture_output(channel)
    end_forks_of_the_loop()
    box = BlackBox() if arguments.box_fd is None else BlackBox.shared(arguments.box_fd)
    try:
        frames = socket.socket(fileno=arguments.frames_fd)
        code = run(frames, arguments.incarnation, exit_process=exit_process, box=box)
    except BaseException:
        # The supervisor explains a death by the last lines of standard error.
        traceback.print_exc(file=standard_error)
        code = EXIT_BUG
    exit_process(code)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headgate.runner", description=__doc__)
    parser.add_argument("--frames-fd", type=int, required=True)
    parser.add_argument("--logs-fd", type=int, required=True)
    parser.add_argument("--box-fd", type=int, help="memory for the black box; without it nothing is noted for others")
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
