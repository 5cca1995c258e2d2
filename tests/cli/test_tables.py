"""Tables for people: what is left out, what is cut, and what never is."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate.cli.tables import cell, print_fields, print_table
from headgate.presentation.errors import without_own_frames
from headgate.presentation.moments import age, duration, exact

ERROR = "ValueError: " + "x" * 99
ID = "manual__2026-11-22T06:39:35.181000+00:00"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has standard output be a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setattr("shutil.get_terminal_size", lambda fallback=None: os.terminal_size((columns, 24)))

    return of


def row(**others: Any) -> dict[str, Any]:
    then = datetime.now(UTC) - timedelta(minutes=3, seconds=5)
    fields = {
        "dag": "etl",
        "run_id": ID,
        "state": "failed",
        "started_at": then,
        "last_error": "ValueError: " + "x" * 99,
    }
    return fields | others


COLUMNS = ("dag", "run_id", "state", "started_at", "ended_at", "last_error")


def test_a_table_fits_the_terminal_and_cuts_the_error_and_no_id(capsys: Any, terminal: Any) -> None:
    terminal(100)
    print_table([row(ended_at=None), row(ended_at=None, dag="other")], COLUMNS)
    lines = capsys.readouterr().out.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[31m", "").splitlines()

    assert lines[0] == f"run id: {ID}"
    assert lines[1].split() == ["dag", "state", "started", "error"], "without the empty column"
    assert all(len(line) <= 100 for line in lines)
    assert lines[2].startswith("etl    failed  3 m ago  ValueError: xxx")
    assert lines[2].endswith("x…")


def test_a_narrow_terminal_has_fewer_columns_and_whole_ids(capsys: Any, terminal: Any) -> None:
    terminal(60)
    print_table([row(ended_at=None)], COLUMNS)

    out = capsys.readouterr().out
    assert ID in out
    assert "started" not in out


def test_states_are_coloured_on_a_terminal_only(capsys: Any, terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    print_table([row()], ("state",))
    assert "\x1b" not in capsys.readouterr().out
    terminal(100)
    print_table([row()], ("state",))
    assert "\x1b[31mfailed\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_table([row()], ("state",))
    assert "\x1b" not in capsys.readouterr().out


def test_a_wide_table_leaves_nothing_out(capsys: Any, terminal: Any) -> None:
    terminal(80)
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    print_table([row(ended_at=None, started_at=moment)] * 2, COLUMNS, wide=True)

    out = capsys.readouterr().out
    assert "ended" in out
    assert "2026-01-02 03:04:05.000 UTC" in out
    assert "x" * 99 in out


def test_an_empty_list_says_so(capsys: Any) -> None:
    print_table([], COLUMNS)
    assert capsys.readouterr().out == "none\n"


def test_one_thing_is_shown_with_exact_times_and_ages(capsys: Any) -> None:
    moment = datetime.now(UTC) - timedelta(hours=5)
    print_fields({"run_id": ID, "ended_at": moment, "conf": None, "text": "x" * 500})

    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"run id    {ID}"
    assert second == f"ended at  {exact(moment)} (5 h ago)"
    assert third == "text      " + "x" * 500


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (12.7, "12 s ago"),
        (185, "3 m ago"),
        (86_399, "23 h ago"),
        (259_200, "3 d ago"),
        (-7205, "in 2 h"),
    ],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(datetime.now(UTC) - timedelta(seconds=seconds)) == text


def test_an_age_of_months_is_a_date() -> None:
    assert age(datetime(2020, 1, 2, 23, tzinfo=UTC)) == "2020-01-02"


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.34, "2.3 s"), (192, "3 m 12 s"), (7505, "2 h 5 m"), (273_700, "3 d 4 h")]
)
def test_a_duration_is_in_its_two_largest_units(seconds: float, text: str) -> None:
    then = datetime(2026, 1, 1, tzinfo=UTC)
    assert duration(then, then + timedelta(seconds=seconds)) == text
    assert duration(then, None) == duration(None, then) == ""


def test_frames_of_headgate_before_those_of_the_user_are_left_out() -> None:
    own = '  File "/site-packages/headgate/tasks/parsing.py", line 9, in parse\n    exec(code)'
    users = '  File "/dags/d7.py", line 3, in <module>\n    nonsense'
    head, end = "Traceback (most recent call last):", "NameError: name 'nonsense' is not defined"

    assert without_own_frames("\n".join([head, own, users, end])) == "\n".join([head, users, end])
    assert without_own_frames("\n".join([head, own, end])) == "\n".join([head, own, end])
    assert without_own_frames("SyntaxError: no") == "SyntaxError: no"
    assert without_own_frames("\n".join([end, "", head, own, users, end])) == "\n".join([head, users, end])
    assert without_own_frames("\n".join(["it failed", head, own, users, end])) == "\n".join(
        ["it failed", head, users, end]
    )


def test_a_cell_of_a_table_cannot_drive_the_terminal() -> None:
    assert cell("\x1b[31mred\nnext") == "\\x1b[31mred\\nnext"


def test_a_long_cell_is_cut_and_shows_it() -> None:
    assert len(cell("x" * 10_000)) == 200
    assert cell("x" * 10_000).endswith("…")
