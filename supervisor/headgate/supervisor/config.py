"""Settings: their names, limits and purposes. `headgate.supervisor.setting_sources` has where they are read from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headgate.protocol.messages.runner import EVENT_BYTES_MAX, FRAME_BYTES_MAX, RunnerSettings
from headgate.supervisor.metrics.address import Address, parse_address

SECONDS_MAX = 366 * 24 * 3600.0  # a time longer than a year is a mistake, and infinity is not a time
BYTES_LIMIT_MAX = 1024**3  # a limit of bytes that must fit in memory, and in the length prefix of a frame
TASK_LOG_BYTES_MAX = 64 * 1024 * 1024  # a hundred thousand lines are some 20 MiB
COUNT_MAX = 1_000_000  # a limit of things that are held in memory
WORKERS_MAX = 1000  # processes of one machine
EVENT_ROOM_BYTES = 64 * 1024  # what a frame needs besides the payload: names, a key, errors
MASK = "***"

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
_SecondsOrNone = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
_Bytes = Annotated[int, msgspec.Meta(ge=1024, le=BYTES_LIMIT_MAX)]
_Workers = Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]
_WorkersOrNone = Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]


def _why(reason: str) -> msgspec.Meta:
    return msgspec.Meta(description=reason)


class ConfigError(Exception):
    """A setting is unknown or has a bad value; ``key`` and ``source`` say which and where."""

    def __init__(self, key: str, source: str, problem: str) -> None:
        super().__init__(f"{problem} ({source})" if source else problem)
        self.key = key
        self.source = source
        self.problem = problem


def _home_default() -> Path:
    return Path("~/.headgate").expanduser()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the supervisor, of the runner it starts, and of the command line.

    Times are seconds. The description of each field is its reason, shown by ``headgate config show``.
    """

    home: Annotated[Path, _why("The folder of the key file and of the embedded database.")] = msgspec.field(
        default_factory=_home_default
    )
    database_url: Annotated[
        str,
        msgspec.Meta(pattern="^(sqlite|postgresql)[a-z0-9+]*://"),
        _why("The database; by default SQLite in the home folder."),
    ] = ""
    fernet_keys: Annotated[
        str | None,
        _why("Keys that encrypt triggers' kwargs, separated by commas or in lines; by default a key file in home."),
    ] = None
    capacity: Annotated[_Count, _why("Triggers one supervisor runs at most; the others take the rest.")] = 1000
    queues: Annotated[
        tuple[_Name, ...],
        msgspec.Meta(min_length=1),
        _why("Queues whose tasks and triggers this supervisor runs."),
    ] = ("default",)
    import_paths: Annotated[
        tuple[_Name, ...],
        _why("Folders of users' modules, put at the end of sys.path in the runner and the workers."),
    ] = (".",)
    pass_env: Annotated[
        tuple[_Name, ...],
        _why("Environment variables, by name or glob, that users' code may see besides the built-in allow-list."),
    ] = ()
    runner_user: Annotated[
        _Name | None,
        _why("The Unix user that runs users' code, if the supervisor is root; by default the supervisor's own."),
    ] = None
    hide_memory: Annotated[
        bool,
        _why("Whether other processes of its user are refused the supervisor's memory, environment and descriptors."),
    ] = True
    log_format: Annotated[
        Literal["auto", "human", "json"],
        _why("Form of the log; auto is human on a terminal and JSON lines elsewhere."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        _why("The least severe record that is written."),
    ] = "info"
    log_folder: Annotated[
        Path,
        _why("The folder of the tasks' logs, by default logs in home; several machines may share it."),
    ] = Path()
    task_log_bytes_max: Annotated[
        _Bytes,
        _why(
            "The log of one try, as one supervisor writes it; beyond it only the end is kept. "
            "Of one task in one run the last 200 tries have theirs."
        ),
    ] = TASK_LOG_BYTES_MAX

    metrics_listen: Annotated[
        _Name | None,
        _why("HOST:PORT on which to answer /metrics, /livez and /readyz; by default nowhere."),
    ] = None
    web_listen: Annotated[
        _Name,
        _why("HOST:PORT on which `headgate web` serves its pages; an address that others reach needs users and TLS."),
    ] = "127.0.0.1:8780"
    web_hosts: Annotated[
        tuple[_Name, ...],
        _why("Names by which browsers reach the pages, besides those of this machine, without a port."),
    ] = ()
    web_trusted_proxies: Annotated[
        tuple[_Name, ...],
        _why("Addresses or networks of proxies whose X-Forwarded-* headers the pages believe; by default nobody's."),
    ] = ()
    web_user_header: Annotated[
        _Name | None,
        _why("The header in which these proxies name the user who has logged in there; by default none is believed."),
    ] = None
    web_plain_http: Annotated[
        bool,
        _why("Whether the pages may be served to other machines without TLS: who listens reads passwords then."),
    ] = False

    # --- the lease ---
    heartbeat_s: Annotated[_Seconds, _why("How often a supervisor renews its lease in the database.")] = 5.0
    lease_silence_max_s: Annotated[
        _Seconds,
        _why("A supervisor silent for longer than this loses its triggers to the others; to be the same for all."),
    ] = 30.0
    cut_off_exit_s: Annotated[
        _Seconds | None,
        _why(
            "A supervisor that cannot renew its lease for longer than this exits, which gives what it holds to others; "
            "by default it waits for its database."
        ),
    ] = None
    poll_interval_s: Annotated[
        _Seconds,
        _why("How often the database is asked for new and removed triggers if no change has been noticed."),
    ] = 5.0

    # --- the runner ---
    runner_heartbeat_s: Annotated[_Seconds, _why("How often an idle runner says that it is alive.")] = 5.0
    runner_silence_max_s: Annotated[
        _Seconds, _why("A runner silent for longer than this is dumped, killed and respawned.")
    ] = 30.0
    frame_bytes_max: Annotated[_Bytes, _why("The longest frame of the link: how much one message may hold.")] = (
        FRAME_BYTES_MAX
    )
    event_bytes_max: Annotated[_Bytes, _why("One encoded payload; a longer one is refused in the runner.")] = (
        EVENT_BYTES_MAX
    )
    round_events_max: Annotated[_Count, _why("Events of one round, which is answered as a whole.")] = 5000
    outbox_events_max: Annotated[_Count, _why("Events waiting for a round; beyond it triggers wait.")] = 10_000
    subscriber_queue_max: Annotated[
        _Count, _why("Raw events a subscriber of a shared stream may have waiting before the stream waits for it.")
    ] = 1024
    ack_timeout_s: Annotated[
        _Seconds, _why("A subscriber that has not resolved an event, or held its stream up, for this long is failed.")
    ] = 300.0
    cohort_grace_s: Annotated[
        _SecondsOrNone, _why("How long a new shared stream waits for more subscribers before it starts.")
    ] = 0.0
    advance_timeout_s: Annotated[
        _Seconds, _why("How long a producer may take to advance its broker before its stream is ended.")
    ] = 60.0
    cancel_grace_s: Annotated[
        _Seconds, _why("How long a cancelled trigger may take to end before the runner is recycled.")
    ] = 10.0
    hook_timeout_s: Annotated[_Seconds, _why("How long cleanup() and on_kill() may take, each.")] = 10.0
    blocked_after_s: Annotated[_Seconds, _why("One step of one trigger longer than this is reported.")] = 0.25

    # --- tasks ---
    dags_folder: Annotated[
        Path, _why("The folder of DAG files, looked through with all in it; by default dags in home.")
    ] = Path()
    dags_look_s: Annotated[_Seconds, _why("How often to look for new and changed DAG files.")] = 5.0
    dag_parse_timeout_s: Annotated[_Seconds, _why("How long a DAG file may take to be parsed.")] = 30.0
    workers: Annotated[_Workers, _why("Worker processes, each of which runs one step of a task at a time.")] = 4
    endless_workers_max: Annotated[
        _WorkersOrNone,
        _why("Worker processes for endless tasks, beside the others; each is there while its task runs."),
    ] = 16
    worker_memory_max_mib: Annotated[
        _Count | None,
        _why("A worker that uses more, with its processes, is ended; no limit by default."),
    ] = None
    worker_grace_s: Annotated[_Seconds, _why("How long a worker told to end its step may take until it is killed.")] = (
        10.0
    )

    # --- waits and retries ---
    respawn_wait_s: Annotated[_Seconds, _why("The wait before a runner that died is started again, at first.")] = 0.1
    respawn_wait_max_s: Annotated[_Seconds, _why("The longest wait between two starts of a dying runner.")] = 30.0
    respawn_healthy_s: Annotated[_Seconds, _why("The wait grows with the ends of runners within this time.")] = 60.0
    retry_wait_s: Annotated[_Seconds, _why("The wait before a failed trigger is started again, at first.")] = 1.0
    retry_wait_max_s: Annotated[_Seconds, _why("The longest wait before a failed trigger is started again.")] = 300.0
    database_retry_wait_s: Annotated[_Seconds, _why("The wait before a database that is away is asked again.")] = 0.1
    database_retry_wait_max_s: Annotated[_Seconds, _why("The longest wait for a database that is away.")] = 10.0

    # --- the work ---
    slice_events_max: Annotated[
        _Count, _why("Events stored in one transaction at most; fewer if they take longer than 0.15 s.")
    ] = 5000
    drain_s: Annotated[
        _Seconds,
        _why("How long a supervisor asked to stop may take to store fired events; running tasks may end meanwhile."),
    ] = 30.0
    capture: Annotated[Path | None, _why("A folder to record every frame of the link in; none by default.")] = None
    capture_file_bytes_max: Annotated[
        _Bytes, _why("The size at which a file of the capture is followed by the next.")
    ] = 64 * 1024 * 1024
    capture_files_max: Annotated[_Count, _why("Files of the capture that are kept; the oldest goes first.")] = 16

    def __post_init__(self) -> None:
        # Defaults that depend on another setting.
        if not self.database_url:
            msgspec.structs.force_setattr(self, "database_url", sqlite_url(self.home / "headgate.db"))
        if self.dags_folder == Path():
            msgspec.structs.force_setattr(self, "dags_folder", self.home / "dags")
        if self.log_folder == Path():
            msgspec.structs.force_setattr(self, "log_folder", self.home / "logs")

    def __repr__(self) -> str:
        # Settings appear in tracebacks and logs; their secrets must not (I12).
        shown = ", ".join(f"{key}={masked(key, getattr(self, key))!r}" for key in self.__struct_fields__)
        return f"Settings({shown})"

    def make_home(self) -> None:
        """Make the home folder, for its owner alone. Raises `ConfigError` if something else is there."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError("home", "", f"the home {self.home} is not a folder, or is within a file") from None

    def make_folders(self) -> None:
        """Make the home folder, and the folder of DAG files if it is the default one.

        Raises `ConfigError` if another folder of DAG files was named and is not there (it is probably misspelt), and
        if one of the two is not a folder.
        """
        self.make_home()
        if self.dags_folder == self.home / "dags":
            self.dags_folder.mkdir(exist_ok=True)
        if not self.dags_folder.is_dir():
            is_there = "is not a folder" if self.dags_folder.exists() else "does not exist"
            raise ConfigError("dags_folder", "", f"the folder of DAG files {self.dags_folder} {is_there}")

    def missing_import_paths(self) -> list[Path]:
        """Return the folders of ``import_paths`` that do not exist; Python ignores them without a warning."""
        return [path for path in map(Path, self.import_paths) if not path.is_dir()]

    @property
    def metrics_address(self) -> Address | None:
        """Where to answer scrapes and health checks; None: nowhere."""
        return None if self.metrics_listen is None else parse_address(self.metrics_listen)

    def runner_settings(self) -> RunnerSettings:
        """Return the part of the settings that travels to the runner in `Welcome`."""
        return RunnerSettings(
            heartbeat_s=self.runner_heartbeat_s,
            frame_bytes_max=self.frame_bytes_max,
            event_bytes_max=self.event_bytes_max,
            round_events_max=self.round_events_max,
            outbox_events_max=self.outbox_events_max,
            subscriber_queue_max=self.subscriber_queue_max,
            ack_timeout_s=self.ack_timeout_s,
            cohort_grace_s=self.cohort_grace_s,
            advance_timeout_s=self.advance_timeout_s,
            cancel_grace_s=self.cancel_grace_s,
            hook_timeout_s=self.hook_timeout_s,
            blocked_after_s=self.blocked_after_s,
            import_paths=self.import_paths,
        )


def sqlite_url(path: Path) -> str:
    """Return the URL of a file of SQLite; two characters of a path mean something else in a URL."""
    return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")


def masked(key: str, value: Any) -> Any:
    """Return the value of a setting as it may be shown: keys and passwords are hidden (I12)."""
    if key == "fernet_keys" and value is not None:
        return MASK
    if key == "database_url":
        # The user part may itself hold an '@'; the host begins after the last one before the path.
        hidden = re.sub(r"(?<=://)([^:/@]*):.*@", rf"\1:{MASK}@", str(value))
        return re.sub(r"(password=)[^&]*", rf"\1{MASK}", hidden)
    return value
