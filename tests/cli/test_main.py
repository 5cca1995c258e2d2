"""The command line as a whole: help, version, errors in one line, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WITHIN_S

from headgate.cli.main import _command_in, _commands


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=WITHIN_S, check=False, **options
    )


def test_help_names_every_command(call: Any) -> None:
    called = call("--help")

    assert called.code == 0
    for command in (
        "db",
        "triggerer",
        "watchers",
        "triggers",
        "triggerers",
        "events",
        "dlq",
        "frames",
        "config",
        "demo",
    ):
        assert command in called.out


def test_help_is_in_groups_and_shows_no_types_for_flags(call: Any) -> None:
    groups = call("--help").out
    assert groups.index("Run ─") < groups.index("DAGs and tasks") < groups.index("Triggers and events")
    assert "--install-completion" in groups
    clear = call("help", "tasks", "clear").out
    assert clear == call("tasks", "clear", "--help").out
    assert "--only-failed" in clear
    assert "<" not in clear


def test_a_call_without_a_command_shows_the_help_and_is_a_usage_error(call: Any) -> None:
    called = call()

    assert called.code == 2
    assert "Usage: headgate" in called.out + called.err


def test_a_current_folder_that_was_removed_is_said_to_be(tmp_path: Path) -> None:
    script = "import os, sys; os.rmdir(os.getcwd()); from headgate.cli.main import main; sys.exit(main(['status']))"
    called = run_python("-c", script, cwd=tmp_path)
    assert called.stderr == "headgate: the current folder has been removed: change to one that exists\n"
    assert called.returncode == 2


def test_the_version_is_that_of_the_package(call: Any) -> None:
    from importlib.metadata import version

    assert call("--version").out == f"headgate {version('headgate')}\n"


def test_asking_for_help_imports_neither_the_database_nor_users_side() -> None:
    heavy = [
        "sqlalchemy",
        "alembic",
        "psycopg",
        "cryptography",
        "structlog",
        "trio",
        "headgate.brokers",
        "headgate.runner",
    ]
    code = (
        "import sys; from headgate.cli.main import main; assert main(['--help']) == 0;"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]; assert not loaded, loaded"
    )

    done = run_python("-c", code)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["bogus"], 2, "headgate: No such command 'bogus'."),
        (["watchers", "add"], 2, "headgate: Missing argument"),
        (["dags", "list", "--home", "x"], 2, "headgate: --home goes before the command: headgate --home DIR dags list"),
        (
            ["tasks", "list", "--state", "deffered"],
            2,
            "headgate: Invalid value for '--state': there is no 'deffered'",
        ),
        (["tasks", "list", "--limit", "x"], 2, "headgate: Invalid value for '--limit': expected a whole number"),
        (["frames", "show", "/nope"], 1, "headgate: there is no file or folder /nope"),
        (["events", "list", "--limit", "0"], 2, "headgate: Invalid value for '--limit'"),
        (["--config", "nowhere.toml", "config", "show"], 2, "headgate: there is no file"),
        (["triggerer", "--capacity", "0"], 2, "headgate: capacity: expected a whole number from 1"),
        (["--db", "mysql://u:hunter2@h/d", "events", "list"], 2, "headgate: database_url: expected a URL"),
        (["--db", "postgresql://u:hunter2@127.0.0.1:1/d", "events", "list"], 1, "headgate: the database postgresql"),
        (["--db", "postgresql://u:hunter2@h:port/d", "events", "list"], 2, "headgate: the database URL cannot be read"),
        (["--db", "postgresql://u:hunter2@[::1/d", "db", "upgrade"], 2, "headgate: the database URL cannot be read"),
        (["frames", "show", "nowhere"], 1, "headgate: "),
    ],
)
def test_an_error_is_one_line_without_a_traceback(call: Any, arguments: list[str], code: int, line: str) -> None:
    called = call(*arguments)

    assert called.code == code
    assert called.out == ""
    assert called.err.startswith(line)
    assert called.err.count("\n") == 1
    assert "hunter2" not in called.err


def test_debug_shows_the_traceback_of_an_error(call: Any) -> None:
    called = call("--debug", "frames", "show", "nowhere")

    assert called.code == 1
    assert "Traceback" in called.err
    assert called.err.splitlines()[-1].startswith("headgate: ")


@pytest.mark.parametrize("arguments", [["config", "show", "--json"], ["config", "show"], ["--version"], ["help"]])
def test_a_reader_that_leaves_early_is_no_error_to_talk_about(tmp_path: Path, arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headgate.cli", *arguments],
            stdout=write_end,
            stderr=subprocess.PIPE,
            env={**os.environ, "HEADGATE_HOME": str(tmp_path)},
            timeout=WITHIN_S,
            check=False,
        )
    finally:
        os.close(write_end)

    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("arguments", ["config show --json", "pools set etl 4", "--version"])
def test_with_standard_output_closed_nothing_is_begun(tmp_path: Path, arguments: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m headgate.cli {arguments} >&-', sys.executable],
        stderr=subprocess.PIPE,
        env={**os.environ, "HEADGATE_HOME": str(tmp_path / "home")},
        timeout=WITHIN_S,
        check=False,
    )
    assert done.stderr == b"headgate: standard output is closed (>&-): send it to a file, or to /dev/null\n"
    assert done.returncode == 1
    assert not (tmp_path / "home").exists()


def test_config_show_names_its_columns(call: Any) -> None:
    assert call("config", "show").out.splitlines()[0].split() == ["key", "value", "source", "meaning"]


def test_config_show_knows_every_value_and_its_place(call: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "headgate.toml").write_text("capacity = 7")
    monkeypatch.setenv("HEADGATE_FERNET_KEYS", "hunter2")

    rows = {row["key"]: row for row in call("--db", "postgresql://u:hunter2@h/d", "config", "show", "--json").rows()}

    assert rows["capacity"]["value"] == 7
    assert rows["capacity"]["source"] == str(home / "headgate.toml")
    assert rows["home"] | {"reason": ""} == {
        "key": "home",
        "value": str(home),
        "source": "HEADGATE_HOME",
        "expected": "a path",
        "reason": "",
    }
    assert rows["database_url"]["value"] == "postgresql://u:***@h/d"
    assert rows["database_url"]["source"] == "--db"
    assert rows["fernet_keys"]["value"] == "***"
    assert "drain_s" in call("config", "show").out


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("runs list", "runs"),
        ("--db sqlite:///runs --debug up --web", "up"),
        ("help up", "help"),
        ("", None),
        ("--help", None),
        ("--db", None),
        ("--db up", None),
        ("--db=up runs", None),
        ("rnus list", None),
    ],
)
def test_the_command_that_is_called_is_known_before_any_is_read(line: str, named: str | None) -> None:
    assert _command_in(line.split()) == named


@pytest.mark.parametrize("name", ["runs", "up", "help"])
def test_one_command_alone_is_as_it_is_among_all(name: str) -> None:
    everything: Any = _commands(None)
    alone: Any = _commands(name)
    assert list(alone.commands) == [name]
    one, other = everything.commands[name], alone.commands[name]
    assert getattr(one, "commands", {}).keys() == getattr(other, "commands", {}).keys()
    assert [param.opts for param in one.params] == [param.opts for param in other.params]
    assert [param.opts for param in everything.params][:5] == [param.opts for param in alone.params][:5]
