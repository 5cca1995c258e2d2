"""The demo of bad messages passes only if these, and no others, are dead letters of the subscribers concerned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headgate.cli.commands import demo as command
from headgate.cli.main import main
from headgate.testing.crash import history
from headgate.testing.poison import (
    BEHIND_S_MAX,
    DEATHS_MAX,
    SUBSCRIBERS,
    Lag,
    Mended,
    PoisonPlan,
    PoisonResult,
    letters_of,
)

PLAN = PoisonPlan(events=50, partitions=2)


MENDED = Mended(
    redriven=5,
    left={},
    stored=dict.fromkeys(SUBSCRIBERS, 50),
    checked=history.Checker([]).report(),
    strange_rows=0,
    exit_code=0,
)


def result(**changes: object) -> PoisonResult:
    good = {
        "plan": PLAN,
        "written": 50,
        "stored": dict.fromkeys(SUBSCRIBERS, 48),
        "checked": history.Checker([]).report(),
        "strange_rows": 0,
        "letters": dict.fromkeys(PLAN.letters(), True),
        "deaths": 2,
        "left_behind": 0,
        "behind_s": 20.0,
        "exit_code": 0,
        "mended": MENDED,
    }
    return PoisonResult(**{**good, **changes})  # type: ignore[arg-type]


def test_there_are_three_bad_messages_and_five_letters() -> None:
    assert len({PLAN.swells, PLAN.raises, PLAN.kills}) == 3
    assert PLAN.letters() == {("raises", 20), ("kills", 30), *((name, 10) for name in SUBSCRIBERS)}


def test_each_subscriber_has_trouble_with_its_own_messages(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("log")
    made = {name: PLAN.trigger(name, folder).serialize()[1] for name in SUBSCRIBERS}
    assert {name: (kwargs["raises"], kwargs["kills"], kwargs["swells"]) for name, kwargs in made.items()} == {
        "takes-most": ([], [], [10]),
        "raises": ([20], [], [10]),
        "kills": ([], [30], [10]),
    }


def test_nothing_is_wrong_if_the_letters_are_those_of_the_bad_messages() -> None:
    assert result().faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"letters": {}}, "no dead letter of a bad message: message 10 of kills, message 30 of kills"),
        (
            {"letters": dict.fromkeys([*PLAN.letters(), ("raises", 7)], True)},
            "dead letters of messages that can be taken: message 7 of raises",
        ),
        ({"letters": dict.fromkeys(PLAN.letters(), False)}, "dead letters that are not whole"),
        ({"left_behind": 1}, "a subscriber was left behind 1 times"),
        ({"deaths": DEATHS_MAX + 1}, "the runner died 6 times"),
        ({"behind_s": BEHIND_S_MAX + 1}, "the stream was behind for 61 s"),
        ({"written": 49}, "49 of 50 events were written"),
        ({"exit_code": 1}, "exit code 1"),
        ({"strange_rows": 2}, "2 stored events are not in the log"),
        ({"mended": replace(MENDED, redriven=4)}, "after the mending, 4 of 5 dead letters came back"),
        ({"mended": replace(MENDED, left={("raises", 20): True})}, "dead letters are left: message 20 of raises"),
        ({"mended": replace(MENDED, stored={"kills": 50, "raises": 49, "takes-most": 50})}, "not everything is stored"),
        ({"mended": replace(MENDED, strange_rows=1)}, "after the mending, 1 stored events are not in the log"),
        ({"mended": replace(MENDED, exit_code=1)}, "after the mending, the supervisor left with exit code 1"),
    ],
)
def test_each_fault_is_named(changes: dict[str, object], fault: str) -> None:
    faults = result(**changes).faults()
    assert len(faults) == 1
    assert fault in faults[0]


def test_a_letter_is_told_by_the_id_in_its_payload_whether_that_is_text_or_cut() -> None:
    rows = [
        {"watcher": "raises", "payload_head": {"id": 20, "partition": "p0"}, "payload_kept": True},
        {"watcher": "kills", "payload_head": '{"id":30,"partition":"p0","padd', "payload_kept": False},
        {"watcher": "kills", "payload_head": "", "payload_kept": False},
    ]
    assert letters_of(rows) == {("raises", 20): True, ("kills", 30): False, ("kills", -1): False}


def test_the_time_behind_the_writer_is_that_of_the_longest_piece() -> None:
    lag = Lag(events_max=10)
    for now, unacknowledged in ((0.0, 5), (1.0, 11), (3.0, 200), (4.0, 10), (5.0, 11), (6.0, 11)):
        lag.sample(now, unacknowledged)
    assert lag.longest_s == 3.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--poison", "--kills", "3"], "--poison has no --kills"),
        (["--poison", "--seed", "3"], "--poison has no --seed"),
        (["--poison", "--events", "5"], "--poison needs --events 20 or more"),
        (["--broker", "redis", "--poison"], "--broker has no --poison"),
        (["--broker", "redis", "--partitions", "2"], "--broker has no --partitions"),
        (["--broker", "pulsar"], "Invalid value for '--broker'"),
    ],
)
def test_options_that_have_no_effect_are_refused(
    options: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("it was started"))
    assert main(["demo", *options]) == 2
    assert error in capfd.readouterr().err


@pytest.mark.campaign
def test_bad_messages_cost_a_real_pair_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = main(["demo", "--poison", "--events", "300", "--partitions", "2"])
    out = capfd.readouterr().out
    assert code == 0, out
    assert out.count(", whole") == len(PLAN.letters())
    assert list(tmp_path.iterdir()) == []
