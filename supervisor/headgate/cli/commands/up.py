"""``headgate up``: everything on one machine."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.commands.database import upgrade_tables
from headgate.cli.invocation import CommandError, Invocation, invocation
from headgate.protocol.startup import without_collections

PAGES_END_S_MAX = 5.0  # they let requests end for 3 s
PAGES_WAIT_S = 1.0  # before they are started again, at first
PAGES_WAIT_MAX_S = 60.0
PAGES_HEALTHY_S = 60.0  # after which an end counts as the first one
SECRET_VARIABLES = frozenset({"HEADGATE_FERNET_KEYS"})


def up(
    ctx: typer.Context,
    dags: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the DAG files.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Worker processes.")] = None,
    endless_workers_max: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes for endless tasks, beside these.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Run at most N triggers.")] = None,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run tasks and triggers of these queues only.")
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Also serve pages, from a process of their own, as `headgate web` does.")
    ] = False,
) -> None:
    """Run everything until it is stopped: upgrade the tables, parse DAG files, run tasks and triggers.

    SIGTERM or Ctrl-C drains: every event that was fired is stored, and tasks may end within drain_s; a task that does
    not loses its try. A second signal does not wait. The exit code is 0 after a complete drain, 1 if the drain was cut
    short, and 3 if another supervisor has taken the lease. Several of these may share one PostgreSQL database.
    """
    with without_collections():
        settings = invocation(ctx).settings(
            dags_folder=dags,
            workers=workers,
            endless_workers_max=endless_workers_max,
            capacity=capacity,
            queues=queues,
            capture=capture,
        )
        from headgate.store.db.engine import open_engine
        from headgate.supervisor.serve import serve

    settings.make_folders()
    engine = open_engine(settings.database_url)
    try:
        upgrade_tables(engine, settings.lease_silence_max_s)
    finally:
        engine.dispose()
    with pages_beside(invocation(ctx)) if web else nullcontext():
        code = serve(settings, capture=settings.capture, runs_tasks=True)
    raise typer.Exit(code)


@contextmanager
def pages_beside(call: Invocation) -> Generator[None]:
    """Serve the pages from a process that ends with this one, without key. Raises `CommandError` without the extra."""
    try:
        importlib.import_module("headgate.web.server")
    except ImportError as error:
        raise CommandError(f'--web needs an extra: pip install "headgate[web]" ({error})') from error
    flags = {"--config": "config", "--home": "home", "--db": "database_url"}
    given = [text for flag, name in flags.items() if call.flags.get(name) for text in (flag, str(call.flags[name]))]
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    pages = Beside([sys.executable, "-P", "-m", "headgate.cli", *given, "web", "--with-stdin"], environment)
    try:
        yield
    finally:
        pages.end()


class Beside:
    """A process beside the supervisor, which goes on without it. It is started again whenever it ends, until `end`.

    It is to end with its standard input, whose other end this process holds.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, wait_s: float = PAGES_WAIT_S) -> None:
        """Start it, and a thread that watches it; ``wait_s``: before it is started again, at first."""
        from headgate.supervisor.backoff import Backoff

        self._command = command
        self._environment = environment
        self._backoff = Backoff(wait_s, PAGES_WAIT_MAX_S)
        self._lock = threading.Lock()  # nothing is started any more once it is leaving
        self._is_leaving = threading.Event()
        self._process = self._started()
        self._thread = threading.Thread(target=self._watch, name="pages", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it; it has `PAGES_END_S_MAX` for that."""
        with self._lock:
            self._is_leaving.set()
        self._process.terminate()
        try:
            self._process.wait(PAGES_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._environment, stdin=subprocess.PIPE, start_new_session=True)

    def _watch(self) -> None:
        import structlog

        log = structlog.get_logger(__name__)
        while True:
            began_at = time.monotonic()
            code = self._process.wait()
            if self._is_leaving.is_set():
                return
            if time.monotonic() - began_at >= PAGES_HEALTHY_S:
                self._backoff.succeed()
            wait_s = self._backoff.fail()
            log.error("the process of the pages has ended", exit_code=code, again_in_s=round(wait_s, 3))
            while not self._start_again(wait_s):
                if self._is_leaving.is_set():
                    return
                wait_s = self._backoff.fail()
                log.error("the process of the pages cannot be started", again_in_s=round(wait_s, 3))

    def _start_again(self, wait_s: float) -> bool:
        """Start it after a while; return whether it was started."""
        self._is_leaving.wait(wait_s)
        with self._lock:
            if self._is_leaving.is_set():
                return False
            self._close()
            try:
                self._process = self._started()
            except OSError:  # the machine has no room for another process just now
                return False
        return True
