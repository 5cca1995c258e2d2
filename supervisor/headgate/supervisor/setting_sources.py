"""Where settings are read from, and the errors about them.

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
from typing import Any
from urllib.parse import unquote

import msgspec

from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.supervisor.config import EVENT_ROOM_BYTES, MASK, ConfigError, Settings, sqlite_url
from headgate.supervisor.metrics.address import check_host, parse_address, parse_network
from headgate.supervisor.setting_words import in_words, nearest

FILE_NAME = "headgate.toml"
ENVIRONMENT_PREFIX = "HEADGATE_"
# Connections and variables are read from the first two (see `headgate.supervisor.queries`), the third is what programs
# send signals with, and the last is for headgate's own tests: they are not settings.
RESERVED_PREFIXES = ("HEADGATE_CONN_", "HEADGATE_VAR_", "HEADGATE_SIGNALS_TOKEN", "HEADGATE_TEST_")


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
_IN_MEMORY = ("sqlite://", "sqlite:///", "sqlite:///:memory:")  # URLs that SQLAlchemy takes for that
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,99}")
# A pair: the first must be less than the second, or the second can never do its work.
_LESS_THAN = (
    ("poll_interval_s", "lease_silence_max_s"),
    ("runner_heartbeat_s", "runner_silence_max_s"),
    ("lease_silence_max_s", "cut_off_exit_s"),
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
    cwd = _current_folder() if cwd is None else cwd
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


def reason(key: str) -> str:
    """Return the purpose of a setting, in one sentence."""
    kind = msgspec.inspect.type_info(_FIELDS[key].type)
    assert isinstance(kind, msgspec.inspect.Metadata), key
    return str((kind.extra_json_schema or {})["description"])


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("", "", "the current folder has been removed: change to one that exists") from None


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
        if key == "database_url" and converted in _IN_MEMORY:
            raise ValueError("a database in memory ends with its process: use sqlite:///path/to/file.db")
        if key == "database_url":
            return _absolute_url(converted, origin)
        if key == "import_paths":
            return _absolute_paths(converted, origin)
        if key in ("metrics_listen", "web_listen") and converted is not None:
            parse_address(converted)
        if key == "web_hosts":
            for host in converted or ():
                check_host(host)
        if key == "web_trusted_proxies":
            for proxy in converted or ():
                parse_network(proxy)
        if key == "web_user_header" and converted is not None and not _HEADER.fullmatch(converted):
            raise ValueError(f"{converted!r} is no name of a header, for example X-Forwarded-User")
        return _absolute(converted, origin) if key in _PATHS and converted is not None else converted
    except (msgspec.ValidationError, RuntimeError) as exc:
        raise ConfigError(key, origin.source, f"{key}: expected {expected(key)}, got {_shown(key, value)}") from exc
    except ValueError as exc:  # of what reads a text
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


def _absolute_url(url: str, origin: Origin) -> str:
    """Return the URL of a database; a relative path of a file of SQLite is made absolute as other paths are."""
    found = re.fullmatch(r"sqlite(?:\+\w+)?:///([^/?][^?]*)(.*)", url, re.DOTALL)
    return url if found is None else sqlite_url(_absolute(Path(unquote(found[1])), origin)) + found[2]


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
        if low_value is not None and high_value is not None and not holds(low_value, high_value):
            at_fault = low if sources[low] != "default" else high
            raise ConfigError(
                at_fault,
                sources[at_fault],
                f"{low} must be {words} {high}, but they are {low_value:g} and {high_value:g}",
            )
    if settings.web_user_header is not None and not settings.web_trusted_proxies:
        raise ConfigError(
            "web_user_header",
            sources["web_user_header"],
            "web_user_header needs web_trusted_proxies: the addresses from which the header is believed",
        )
    if settings.frame_bytes_max < KWARGS_BYTES_MAX + EVENT_ROOM_BYTES:
        raise ConfigError(
            "frame_bytes_max",
            sources["frame_bytes_max"],
            f"frame_bytes_max must be at least {KWARGS_BYTES_MAX + EVENT_ROOM_BYTES:,}: "
            f"the kwargs of one trigger, and its names, go into one frame",
        )
