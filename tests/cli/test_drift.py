"""The exit code of `headgate streams drift`; `tests/integration/test_drift.py` has the command with a broker."""

from __future__ import annotations

import pytest

from headgate.cli.commands.streams import CANNOT_BE_TOLD, drift_exit_code
from headgate.protocol.messages.runner import CANNOT_TELL

WELL = {"verdict": "behind", "error": None}
AWAY = {"verdict": "cannot be told", "error": "no supervisor runs it"}
WITHOUT_POSITIONS = {"verdict": "cannot be told", "error": CANNOT_TELL}
BACK = {"verdict": "went back", "error": None}
MOVED = {"verdict": "moved by others", "error": None}


@pytest.mark.parametrize(
    ("records", "is_named", "code"),
    [
        ([], False, 0),
        ([WELL], True, 0),
        ([WELL, AWAY], False, CANNOT_BE_TOLD),
        ([WELL, WITHOUT_POSITIONS], False, 0),
        ([WITHOUT_POSITIONS], True, CANNOT_BE_TOLD),
        ([AWAY, BACK], False, 1),
        ([AWAY, BACK, MOVED], False, 2),
    ],
)
def test_what_is_wrong_goes_before_what_cannot_be_told(
    records: list[dict[str, str | None]], is_named: bool, code: int
) -> None:
    assert drift_exit_code(records, is_named=is_named) == code
