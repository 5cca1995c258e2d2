"""`headgate.cli.batch`: many commands of a program in one process, and the tests' client of it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WITHIN_S

from headgate.cli import batch
from headgate.testing.crash.commands import Commands, PairFailed
from headgate.testing.crash.pair import READY, Pair


def run_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *commands: Any) -> list[Any]:
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    batch.run()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_command_is_answered_with_its_code_and_what_it_has_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = {"HEADGATE_HOME": str(tmp_path / "a")}
    made, listed, wrong, elsewhere = run_batch(
        monkeypatch,
        capsys,
        {"arguments": ["db", "upgrade"], "environment": home},
        {"arguments": ["watchers", "list", "--json"], "environment": home},
        {"arguments": ["no-such"], "environment": home},
        {"arguments": ["watchers", "list"], "environment": {"HEADGATE_HOME": str(tmp_path / "b")}},
    )
    assert (made["code"], made["errors"]) == (0, "")
    assert "headgate.db" in made["output"]
    assert listed == {"code": 0, "output": "", "errors": ""}
    assert (wrong["code"], wrong["output"]) == (2, "")
    assert "no-such" in wrong["errors"]
    assert elsewhere["code"] == 1
    assert "there is no database" in elsewhere["errors"]
    assert os.environ["HEADGATE_HOME"] == str(tmp_path / "b"), "each has its own settings, and none of the one before"


def test_a_command_that_raises_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str]) -> int:
        if arguments == ["bad"]:
            raise KeyError("nobody foresaw it")
        print("done")
        return 0

    monkeypatch.setattr(batch, "main", main)
    bad, good = run_batch(
        monkeypatch, capsys, {"arguments": ["bad"], "environment": {}}, {"arguments": ["good"], "environment": {}}
    )
    assert bad["code"] == batch.EXIT_BUG
    assert "KeyError: 'nobody foresaw it'" in bad["errors"]
    assert good == {"code": 0, "output": "done\n", "errors": ""}


@pytest.fixture
def commands(tmp_path: Path) -> Any:
    made = Commands(tmp_path)
    yield made
    made.close()


def test_commands_of_a_test_run_in_one_process_until_one_fails(commands: Commands, tmp_path: Path) -> None:
    environment = {**os.environ, "HEADGATE_HOME": str(tmp_path / "home")}

    def pid() -> int:
        assert commands._process is not None
        return commands._process.pid

    assert "headgate.db" in commands.run(["db", "upgrade"], environment, WITHIN_S)
    first = pid()
    assert commands.run(["watchers", "list", "--json"], environment, WITHIN_S) == ""
    assert pid() == first
    with pytest.raises(PairFailed, match=r"headgate watchers remove failed: headgate: .*nobody"):
        commands.run(["watchers", "remove", "nobody"], environment, WITHIN_S)
    assert commands._process is None
    assert commands.run(["watchers", "list", "--json"], environment, WITHIN_S) == ""
    assert pid() != first


def test_a_process_of_commands_that_dies_or_hangs_is_told_and_replaced(commands: Commands, tmp_path: Path) -> None:
    environment = {**os.environ, "HEADGATE_HOME": str(tmp_path / "home")}
    commands.run(["--version"], environment, WITHIN_S)
    assert commands._process is not None
    os.kill(commands._process.pid, signal.SIGKILL)
    with pytest.raises(PairFailed, match="headgate --version has ended the process of commands"):
        commands.run(["--version"], environment, WITHIN_S)
    commands.run(["--version"], environment, WITHIN_S)
    assert commands._process is not None
    os.kill(commands._process.pid, signal.SIGSTOP)
    with pytest.raises(PairFailed, match="headgate --version has not ended within 0 s"):
        commands.run(["--version"], environment, 0.0)
    assert commands._process is None


def test_a_pair_knows_from_its_log_how_many_runners_were_ready_unless_its_settings_leave_that_out(
    tmp_path: Path,
) -> None:
    with Pair(tmp_path / "pair") as pair:
        assert pair.ready_count() == 0
        pair.log_path.write_text(f"[info ] {READY} pid=1\n[info ] {READY} pid=2\n")
        assert pair.ready_count() == 2
        assert pair.tells_ready
        pair.set(log_level="warning")
        assert not pair.tells_ready
