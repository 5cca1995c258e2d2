"""Assembly of a supervisor from its settings."""

from __future__ import annotations

import os
import platform
import random
import selectors
import socket
import stat
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from headgate.protocol.framelog.log import FrameLogWriter
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.store.db.engine import open_engine
from headgate.store.db.schema import require_current
from headgate.store.inspect.why_facts import Liveness
from headgate.store.keys import open_secrets
from headgate.store.store import Store
from headgate.store.triggers.leases import TriggererRow
from headgate.supervisor.arbiter import Arbiter
from headgate.supervisor.backoff import DatabaseOutage
from headgate.supervisor.children.isolation import RunAs, hide_memory, user_named
from headgate.supervisor.children.link import RunnerLink
from headgate.supervisor.children.process import environment_of_children, start_runner
from headgate.supervisor.config import ConfigError, Settings
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.leaving import DRAIN_MARGIN_S, HANG_MARGIN_S
from headgate.supervisor.logs import process_log
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.metrics.service_manager import ServiceManager
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.replay.capture import Capture
from headgate.supervisor.reporting import Reported, Reporter
from headgate.supervisor.tasks.assembly import task_part
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

log = structlog.get_logger(__name__)


def machine_identity() -> str:
    """Name the set of processes among which a pid is unique: this boot of this machine, this pid namespace.

    It differs between two containers with one host name, and between two boots.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        if os.readlink("/proc/self") == str(os.getpid()):
            return f"{boot} {namespace}"
        # /proc belongs to another namespace (for example the host's): its pids are those of other processes.
    except OSError:
        pass
    # Unknown: a unique name, so that no other supervisor is ever taken for dead because of its pid.
    return f"{platform.node()}-{os.getpid()}-{random.getrandbits(64):x}"


def start_of_process(pid: int | Literal["self"]) -> float:
    """Return when a process was started, in clock ticks since the boot: no step of the wall clock changes it.

    Raises `FileNotFoundError` if /proc shows no such process, which may hide it from us, and `ProcessLookupError`
    if it has ended, but is not yet reaped by its parent.
    """
    # proc(5): the command's name is in parentheses and may contain anything; the third field follows it.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    state, start = fields[0], fields[19]
    if state in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return float(start)


def this_process() -> Identity:
    """The identity of this process."""
    return Identity(
        hostname=socket.gethostname(),
        pid=os.getpid(),
        machine=machine_identity(),
        process_started=start_of_process("self"),
    )


def is_gone(row: TriggererRow, here: Identity) -> bool:
    """Whether the process of another supervisor has certainly ended; False if this cannot be known."""
    if row.machine != here.machine:
        return False
    try:
        return start_of_process(row.pid) != row.process_started
    except ProcessLookupError:
        return True
    except FileNotFoundError:
        return not _may_exist(row.pid)
    except OSError:
        return False


def _may_exist(pid: int) -> bool:
    """Ask the kernel: with hidepid=2, or systemd's ProtectProc=invisible, /proc hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is there, and not ours to signal
    return True


def core_settings(settings: Settings, *, runs_tasks: bool = False) -> CoreSettings:
    """The part of the settings that the core works with."""
    return CoreSettings(
        runner=settings.runner_settings(),
        lease=LeaseTimes(
            settings.heartbeat_s,
            settings.lease_silence_max_s,
            settings.poll_interval_s,
            cut_off_max_s=settings.cut_off_exit_s,
        ),
        capacity=settings.capacity,
        queues=settings.queues,
        workers=settings.workers if runs_tasks else 0,
        endless_workers=settings.endless_workers_max if runs_tasks else 0,
        runner_silence_max_s=settings.runner_silence_max_s,
        respawn_wait_s=settings.respawn_wait_s,
        respawn_wait_max_s=settings.respawn_wait_max_s,
        respawn_healthy_s=settings.respawn_healthy_s,
        retry_wait_s=settings.retry_wait_s,
        retry_wait_max_s=settings.retry_wait_max_s,
        database_retry_wait_s=settings.database_retry_wait_s,
        database_retry_wait_max_s=settings.database_retry_wait_max_s,
        slice_events_max=settings.slice_events_max,
        drain_s=settings.drain_s,
    )


def serve(settings: Settings, *, capture: Path | None = None, runs_tasks: bool = False) -> int:
    """Run a supervisor until it is asked to stop or loses its lease; return the exit code.

    It runs triggers, and with ``runs_tasks`` it parses DAG files, schedules, and runs tasks as well.

    Raises `SchemaOutOfDate` when the database has not been migrated, `DatabaseAway` when it cannot be
    reached at the start, `UnusableKey` for keys that are not those of the database.
    """
    for folder in settings.missing_import_paths():
        log.warning("a folder of import_paths does not exist", folder=str(folder))
    run_as = _separate(settings)
    identity = this_process()
    selector = selectors.DefaultSelector()
    figures = Figures()
    outage = DatabaseOutage(figures)
    with ExitStack() as closing:
        engine = open_engine(settings.database_url)
        closing.callback(engine.dispose)
        require_current(engine)
        secrets = open_secrets(engine, settings.home, settings.fernet_keys, makes_file=True)
        store = Store(engine, secrets=secrets)
        closing.callback(store.close)
        answers = StoreQueries(store, os.environ, frame_bytes_max=settings.frame_bytes_max)
        task_logs = TaskLogs(settings.log_folder, bytes_max=settings.task_log_bytes_max)
        closing.callback(task_logs.close)
        recorder = None if capture is None else _open_recorder(settings, capture)
        if recorder is not None:
            closing.callback(recorder.close)
        environment = environment_of_children(settings, engine.url)
        hide = answers.secrets.hide_in_bytes
        tasks = None
        if runs_tasks:
            tasks = task_part(
                settings,
                selector,
                store,
                answers=answers,
                task_logs=task_logs,
                environment=environment,
                run_as=run_as,
                outage=outage,
                figures=figures,
            )
            closing.callback(tasks.close)
        core = SupervisorCore(
            store,
            identity,
            core_settings(settings, runs_tasks=runs_tasks),
            is_gone=lambda row: is_gone(row, identity),
            answers=answers,
            task_logs=task_logs,
            tasks=tasks,
            outage=outage,
            figures=figures,
        )
        liveness = Liveness(settings.lease_silence_max_s, partial(is_gone, here=identity))
        reporter = _reporter(settings, Reported(core, store, figures, outage, liveness), selector)
        closing.callback(reporter.close)
        with process_log.in_background():
            return Arbiter(
                core,
                lambda incarnation: start_runner(incarnation, environment=environment, hide=hide, run_as=run_as),
                partial(_link_of, settings, recorder),
                task_logs=task_logs,
                selector=selector,
                bell=store.database.doorbell(),
                reporter=reporter,
            ).run()


def _reporter(settings: Settings, reported: Reported, selector: selectors.BaseSelector) -> Reporter:
    try:
        return Reporter(
            reported,
            selector,
            address=settings.metrics_address,
            service_manager=ServiceManager(os.environ),
            leaves_within_s=settings.drain_s + DRAIN_MARGIN_S + HANG_MARGIN_S,
        )
    except OSError as error:
        text = f"metrics_listen: cannot listen on {settings.metrics_listen}: {error.strerror or error}"
        raise ConfigError("metrics_listen", "", text) from None


def _separate(settings: Settings) -> RunAs | None:
    """Keep this process's secrets from users' code; return the user that runs that. Raises `ConfigError`."""
    if settings.hide_memory:
        hide_memory()
    if settings.runner_user is None:
        return None
    try:
        run_as = user_named(settings.runner_user)
    except ValueError as error:
        raise ConfigError("runner_user", "", f"runner_user: {error}") from None
    if settings.home.exists() and stat.S_IMODE(settings.home.stat().st_mode) & 0o077:
        log.warning("the home folder is open to other users; run chmod 700 on it", folder=str(settings.home))
    return run_as


def _open_recorder(settings: Settings, capture: Path) -> Capture:
    return Capture(
        FrameLogWriter(capture, file_bytes_max=settings.capture_file_bytes_max, files_max=settings.capture_files_max)
    )


def _link_of(settings: Settings, recorder: Capture | None, sock: socket.socket, incarnation: int) -> RunnerLink:
    connection = Connection(
        RunnerDialect(incarnation),
        Role.SUPERVISOR,
        frame_bytes_max=settings.frame_bytes_max,
        observer=None if recorder is None else recorder.of(incarnation),
    )
    return RunnerLink(sock, connection, "runner")
