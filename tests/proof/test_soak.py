"""The soak finds what it is for, and passes in small."""

from __future__ import annotations

from typing import Any

import pytest
from tests.proof import soak

GOOD = soak.Outcome(
    written=10,
    rows=dict.fromkeys(soak.SUBSCRIBERS, 10),
    different=dict.fromkeys(soak.SUBSCRIBERS, 10),
    recoveries=[soak.Recovery(0.5, 100, 1, 1)] * 5,
    exit_code=0,
)


def test_nothing_is_wrong_if_all_is_stored_once_and_recoveries_stay_short() -> None:
    slow_first = [soak.Recovery(3.0, 100, 1, 1), *GOOD.recoveries]
    assert GOOD.faults() == GOOD._replace(recoveries=slow_first).faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"different": {**GOOD.different, "soak-1": 9}, "rows": {**GOOD.rows, "soak-1": 9}}, "lost: {'soak-1': 1}"),
        ({"rows": {**GOOD.rows, "soak-1": 12}}, "stored twice: {'soak-0': 0, 'soak-1': 2, 'soak-2': 0}"),
        ({"recoveries": [soak.Recovery(1.5, 100, 1, 1)] * 2}, "the last recoveries took 1.50 s"),
        ({"exit_code": 1}, "exit code 1"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], fault: str) -> None:
    (found,) = GOOD._replace(**changes).faults()
    assert fault in found


@pytest.mark.campaign
def test_a_small_soak_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--minutes", "0.3", "--every", "6", "--rate", "100"])
    printed = capsys.readouterr().out
    assert printed.count("recovery ") == 3
    assert "1,800 events written, stored by {'soak-0': 1800, 'soak-1': 1800, 'soak-2': 1800}, 3 kills" in printed
    assert "lost" not in printed
    assert "twice" not in printed
