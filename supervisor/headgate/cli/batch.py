"""Many commands in one process, for a program that runs one after the other: ``python -P -m headgate.cli.batch``.

To import headgate takes most of the time of a short command. Each line of standard input is a command, as JSON: its
``arguments``, and the variables ``HEADGATE_...`` of its ``environment``. For each a line is written to standard output:
its exit code and what it has printed. The end of the input ends the process.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from headgate.cli.main import main
from headgate.supervisor.setting_sources import ENVIRONMENT_PREFIX

EXIT_BUG = 70  # a command raised what `main` does not expect; its traceback is in the error output


def run() -> None:
    """Run commands until there are no more."""
    answers = sys.stdout
    for line in sys.stdin:
        command = json.loads(line)
        for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
            del os.environ[name]
        os.environ.update(command["environment"])
        code, output, errors = _called(command["arguments"])
        print(json.dumps({"code": code, "output": output, "errors": errors}), file=answers, flush=True)


def _called(arguments: Sequence[str]) -> tuple[int, str, str]:
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
            code = EXIT_BUG
    return code, output.getvalue(), errors.getvalue()


if __name__ == "__main__":
    run()
