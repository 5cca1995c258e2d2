"""How figures become rows, rows a table, and a table a part of a document."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES
from benchmarks.harness import Bench, Case, Document, Figure, Options, Target, TimeLimit, measure, rendered, row_of

from benchmarks import harness, report

OPTIONS = Options(size="full", databases=("sqlite",), json=False, only="", repeats=3, limit_s=60.0)
FIGURE = Figure("speed", "rows/s", Target(ratio_min=0.5, value_min=100))


def bench_of(*cases: Case) -> Bench:
    return Bench("toy", "toy: nothing at all", "nothing", lambda options: cases)


def test_ours_and_the_baseline_run_in_turn() -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> dict[str, float]:
        calls.append(name)
        return {"speed": value}

    case = Case("c", [FIGURE], lambda: side("ours", 10), lambda: side("baseline", 20))
    document = measure(bench_of(case), OPTIONS)
    assert calls == ["ours", "baseline"] * 3
    assert [(row.median, row.baseline, row.ratio) for row in document.rows] == [(10, 20, 0.5)]


@pytest.mark.parametrize(
    ("ours", "theirs", "reached"),
    [((200, 120, 90), (200, 10, 240), True), ((99,), (100,), False), ((200,), (401,), False)],
)
def test_a_row_holds_medians_the_spread_and_whether_all_bounds_are_held(
    ours: tuple[float, ...], theirs: tuple[float, ...], reached: bool
) -> None:
    row = row_of(Case("c", [FIGURE], dict, None), FIGURE, [{"speed": v} for v in ours], [{"speed": v} for v in theirs])
    assert (row.low, row.high) == (min(ours), max(ours))
    assert (row.baseline_low, row.baseline_high) == (min(theirs), max(theirs))
    assert row.reached is reached
    assert row.target == "≥ 100, ratio ≥ 0.5"


def test_a_target_on_a_ratio_is_not_reached_without_a_baseline() -> None:
    row = row_of(Case("c", [FIGURE], dict, None), FIGURE, [{"speed": 1000.0}], [])
    assert (row.ratio, row.reached) == (None, False)


def test_a_figure_may_have_another_name_in_the_baseline() -> None:
    figure = Figure("speed", "rows/s", baseline="pace")
    row = row_of(Case("c", [figure], dict, None), figure, [{"speed": 6.0}], [{"pace": 3.0}])
    assert (row.ratio, row.reached, row.target) == (2.0, None, "")


def test_what_was_measured_before_the_time_was_over_is_kept() -> None:
    def too_long() -> dict[str, float]:
        time.sleep(60)
        raise AssertionError("nobody stopped it")

    def out_of_time() -> dict[str, float]:
        raise harness.OutOfTime("stopped after 1 s")

    quick = Case("quick", [FIGURE], lambda: {"speed": 1.0}, None)
    document = measure(bench_of(quick, Case("slow", [FIGURE], out_of_time, None)), OPTIONS)
    assert [row.case for row in document.rows] == ["quick"]
    assert "NOT COMPLETE: stopped after 1 s" in rendered(document)
    with pytest.raises(harness.OutOfTime), TimeLimit(0.01):
        too_long()


def test_the_command_writes_its_parts_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine", lambda: ["- a machine"])
    path = tmp_path / "performance.md"
    parts = ["<!-- begin machine -->", "<!-- end machine -->", "by hand"]
    parts += ["<!-- begin bench toy -->", "old", "<!-- end bench toy -->", "end", ""]
    path.write_text("\n".join(parts))
    row = row_of(Case("c", [FIGURE], dict, None), FIGURE, [{"speed": 1.0}], [{"speed": 2.0}])
    document = Document("toy", "toy", "nothing", "full", 1, 0.1, [row])
    for _ in range(2):  # writing it again changes nothing but the time
        report.write([document], path)
        text = path.read_text()
        assert text.startswith("<!-- begin machine -->\n\n- a machine\n\n<!-- end machine -->\nby hand\n")
        assert text.count("rows/s") == 1
        assert "old" not in text
        assert text.endswith("<!-- end bench toy -->\nend\n")


def test_the_document_has_a_part_for_every_benchmark() -> None:
    text = report.PATH.read_text()
    for name in ("machine", *[f"bench {name}" for name in NAMES]):
        assert text.count(f"<!-- begin {name} -->") == text.count(f"<!-- end {name} -->") == 1, name
