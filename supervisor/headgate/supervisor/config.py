"""Settings: their names and limits, the places they are read from, and the errors about them.

A setting is looked for in four places, the later ones winning::

    built-in default  <  headgate.toml  <  HEADGATE_* environment variables  <  command-line flags

The file is the one named by ``--config``, else ``./headgate.toml``, else ``$HEADGATE_HOME/headgate.toml``; it
is flat, one ``key = value`` for each setting. An unknown key and a value out of range are errors that name the key,
the place and the expected value: a misspelt setting must not silently be the default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from headgate.protocol.messages.runner import EVENT_BYTES_MAX, FRAME_BYTES_MAX, KWARGS_BYTES_MAX, RunnerSettings
from headgate.supervisor.metrics.address import Address, parse_address
from headgate.supervisor.setting_words import in_words, nearest

FILE_NAME = "headgate.toml"
ENVIRONMENT_PREFIX = "HEADGATE_"
# Connections and variables are read from the first two (see `headgate.supervisor.queries`), the third is what programs
# send signals with, and the last is for headgate's own tests: they are not settings.
RESERVED_PREFIXES = ("HEADGATE_CONN_", "HEADGATE_VAR_", "HEADGATE_SIGNALS_TOKEN", "HEADGATE_TEST_")

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
        _why("Keys that encrypt triggers' kwargs, comma separated, the first encrypts; by default a key file in home."),
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
        _Bytes, _why("The log of one try, as one supervisor writes it; beyond it only the end is kept.")
    ] = TASK_LOG_BYTES_MAX

    metrics_listen: Annotated[
        _Name | None,
        _why("HOST:PORT on which to answer /metrics, /livez and /readyz; by default nowhere."),
    ] = None
    web_listen: Annotated[
        _Name,
        _why("HOST:PORT, of this machine alone, on which `headgate web` serves its pages."),
    ] = "127.0.0.1:8780"

    # --- the lease ---
    heartbeat_s: Annotated[_Seconds, _why("How often a supervisor renews its lease in the database.")] = 5.0
    lease_silence_max_s: Annotated[
        _Seconds,
        _why("A supervisor silent for longer than this loses its triggers to the others; to be the same for all."),
    ] = 30.0
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
            msgspec.structs.force_setattr(self, "database_url", f"sqlite:///{self.home}/headgate.db")
        if self.dags_folder == Path():
            msgspec.structs.force_setattr(self, "dags_folder", self.home / "dags")
        if self.log_folder == Path():
            msgspec.structs.force_setattr(self, "log_folder", self.home / "logs")

    def __repr__(self) -> str:
        # Settings appear in tracebacks and logs; their secrets must not (I12).
        shown = ", ".join(f"{key}={masked(key, getattr(self, key))!r}" for key in KEYS)
        return f"Settings({shown})"

    def make_folders(self) -> None:
        """Make the home folder, and the folder of DAG files if it is the default one.

        Raises `ConfigError` if another folder of DAG files was named and is not there: it is probably misspelt.
        """
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
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


class Origin(msgspec.Struct, frozen=True):
    """The place that a value comes from: ``default``, the path of a file, a variable, or a flag."""

    source: str
    relative_to: Path  # the folder that a relative path in this place is relative to


class Resolved(msgspec.Struct, frozen=True):
    """Settings, and the source of each. ``sources`` has every key; ``file`` is the file that was read, if any."""

    settings: Settings
    sources: dict[str, str]
    file: Path | None


_FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
KEYS = tuple(_FIELDS)
_PATHS = ("home", "capture", "dags_folder", "log_folder")
# Flags with another name than their setting.
_FLAGS = {"database_url": "--db", "log_level": "--debug", "dags_folder": "--dags", "web_listen": "--listen"}
_SECRETS = ("fernet_keys", "database_url")
# A pair: the first must be less than the second, or the second can never do its work.
_LESS_THAN = (
    ("poll_interval_s", "lease_silence_max_s"),
    ("runner_heartbeat_s", "runner_silence_max_s"),
)
_AT_MOST = (
    ("respawn_wait_s", "respawn_wait_max_s"),
    ("retry_wait_s", "retry_wait_max_s"),
    ("database_retry_wait_s", "database_retry_wait_max_s"),
)


def resolve_settings(
    *,
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Look for every setting in all places; return the settings and the source of each.

    ``flags`` holds settings by name, None for a flag that was not given, and under ``config`` the file to read. Paths
    are made absolute: those in a file are relative to its folder, all others to ``cwd``.

    Raises `ConfigError` for the first unknown key or bad value.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    given = {key: value for key, value in flags.items() if value is not None}
    file = _find_file(given, environ, cwd)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for key, value, origin in _everything_given(given, environ, cwd, file):
        values[key] = _converted(key, value, origin)
        origins[key] = origin
    here = Origin("default", cwd)
    values.setdefault("import_paths", _absolute_paths(_FIELDS["import_paths"].default, here))
    try:
        settings = Settings(**values)
    except RuntimeError as exc:  # Path.expanduser, for a user who has no home folder
        raise ConfigError("home", "", f"home is not set, and there is no default for it: {exc}") from exc
    sources = {key: origins.get(key, here).source for key in KEYS}
    _check_pairs(settings, sources)
    return Resolved(settings, sources, file)


def masked(key: str, value: Any) -> Any:
    """Return the value of a setting as it may be shown: keys and passwords are hidden (I12)."""
    if key == "fernet_keys" and value is not None:
        return MASK
    if key == "database_url":
        # The user part may itself hold an '@'; the host begins after the last one before the path.
        hidden = re.sub(r"(?<=://)([^:/@]*):.*@", rf"\1:{MASK}@", str(value))
        return re.sub(r"(password=)[^&]*", rf"\1{MASK}", hidden)
    return value


def reason(key: str) -> str:
    """Return the purpose of a setting, in one sentence."""
    kind = msgspec.inspect.type_info(_FIELDS[key].type)
    assert isinstance(kind, msgspec.inspect.Metadata), key
    return str((kind.extra_json_schema or {})["description"])


def _find_file(given: Mapping[str, Any], environ: Mapping[str, str], cwd: Path) -> Path | None:
    if (named := given.get("config")) is not None:
        path = cwd / Path(named).expanduser()
        if not path.is_file():
            raise ConfigError("config", "--config", f"there is no file {path}")
        return path
    home = given.get("home") or environ.get("HEADGATE_HOME") or "~/.headgate"
    try:
        candidates = (cwd / FILE_NAME, cwd / Path(home).expanduser() / FILE_NAME)
    except RuntimeError:  # no home folder, so there is no file in it either
        candidates = (cwd / FILE_NAME,) * 2
    return next((path for path in candidates if path.exists()), None)


def _everything_given(
    given: Mapping[str, Any], environ: Mapping[str, str], cwd: Path, file: Path | None
) -> Iterator[tuple[str, Any, Origin]]:
    """Yield every value that was given anywhere, in the order in which later ones win."""
    if file is not None:
        for key, value in _read_file(file).items():
            if key not in _FIELDS:
                if isinstance(value, dict):
                    problem = f"there is no table [{key}]: settings stand at the top level, one key = value a line"
                    raise ConfigError(key, str(file), problem)
                raise ConfigError(key, str(file), f"unknown key {key!r}{nearest(key, KEYS)}")
            yield key, value, Origin(str(file), file.parent)
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(RESERVED_PREFIXES):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in _FIELDS or name != _variable(key):
            variables = [_variable(key) for key in KEYS]
            raise ConfigError(key, "environment", f"unknown variable {name}{nearest(name.upper(), variables)}")
        yield key, environ[name], Origin(name, cwd)
    for key, value in given.items():
        if key != "config":
            if key not in _FIELDS:
                raise ConfigError(key, _flag(key), f"unknown key {key!r}{nearest(key, KEYS)}")
            yield key, value, Origin(_flag(key), cwd)


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _flag(key: str) -> str:
    return _FLAGS.get(key) or "--" + key.replace("_", "-")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except IsADirectoryError as exc:
        raise ConfigError("config", str(file), "a file of settings was expected, and this is a folder") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise ConfigError("config", str(file), f"the file cannot be read: {exc}") from exc


def _converted(key: str, value: Any, origin: Origin) -> Any:
    """Return the value in the type of its setting. Raises `ConfigError`, which never shows a secret."""
    kind = _FIELDS[key].type
    if isinstance(value, str):
        value = value.strip()
        if key == "database_url":
            value = re.sub(r"^postgres://", "postgresql://", value)
        if isinstance(_FIELDS[key].default, tuple):
            value = [item.strip() for item in value.split(",") if item.strip()]
        elif key in ("log_format", "log_level"):
            value = value.lower()
        elif value == "" and _FIELDS[key].default is None:
            return None
    try:
        # Variables and flags are text, from which a number has to be read; a file may write it as text as well.
        converted = msgspec.convert(value, kind, strict=not isinstance(value, str), dec_hook=_decode_path)
        if key == "import_paths":
            return _absolute_paths(converted, origin)
        if key in ("metrics_listen", "web_listen") and converted is not None:
            parse_address(converted)
        return _absolute(converted, origin) if key in _PATHS and converted is not None else converted
    except (msgspec.ValidationError, RuntimeError) as exc:
        raise ConfigError(key, origin.source, f"{key}: expected {expected(key)}, got {_shown(key, value)}") from exc
    except ValueError as exc:  # of `parse_address`
        raise ConfigError(key, origin.source, f"{key}: {exc}") from exc


def _shown(key: str, value: Any) -> str:
    """Return a bad value as an error may show it. A URL that is malformed may have its password anywhere."""
    if key == "database_url" and isinstance(value, str):
        scheme = re.match(r"([a-z][a-z0-9+]{0,30})://", value, re.IGNORECASE)
        return f"one that begins with '{scheme[1]}://'" if scheme else "a text that does not begin with a scheme"
    return repr(MASK) if key in _SECRETS else repr(value)


def _decode_path(kind: type, value: Any) -> Path:
    if isinstance(value, (str, Path)) and str(value) and "\0" not in str(value):
        return Path(value)
    raise ValueError("not a path")


def _absolute(path: Path, origin: Origin) -> Path:
    return Path(os.path.normpath(origin.relative_to / path.expanduser()))


def _absolute_paths(paths: tuple[str, ...], origin: Origin) -> tuple[str, ...]:
    return tuple(str(_absolute(Path(path), origin)) for path in paths)


def expected(key: str) -> str:
    """Describe the values that a setting takes."""
    return in_words(msgspec.inspect.type_info(_FIELDS[key].type))


def _check_pairs(settings: Settings, sources: Mapping[str, str]) -> None:
    """Check the settings against each other. Raises `ConfigError` with the names of both."""
    checks: list[tuple[str, str, Callable[[float, float], bool], str]] = [
        # So that one renewal may fail or be late, and brokers are still advanced.
        ("heartbeat_s", "lease_silence_max_s", lambda a, b: 2 * a <= b, "at most half of"),
        *((low, high, lambda a, b: a < b, "less than") for low, high in _LESS_THAN),
        *((low, high, lambda a, b: a <= b, "at most") for low, high in _AT_MOST),
        (
            "event_bytes_max",
            "frame_bytes_max",
            lambda a, b: a + EVENT_ROOM_BYTES <= b,
            f"at least {EVENT_ROOM_BYTES:,} less than",
        ),
    ]
    for low, high, holds, words in checks:
        low_value, high_value = getattr(settings, low), getattr(settings, high)
        if not holds(low_value, high_value):
            at_fault = low if sources[low] != "default" else high
            raise ConfigError(
                at_fault,
                sources[at_fault],
                f"{low} must be {words} {high}, but they are {low_value:g} and {high_value:g}",
            )
    if settings.frame_bytes_max < KWARGS_BYTES_MAX + EVENT_ROOM_BYTES:
        raise ConfigError(
            "frame_bytes_max",
            sources["frame_bytes_max"],
            f"frame_bytes_max must be at least {KWARGS_BYTES_MAX + EVENT_ROOM_BYTES:,}: "
            f"the kwargs of one trigger, and its names, go into one frame",
        )
