"""The DAGs of docs/signals.md, run as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headgate.signals import RESTART, SignalAction, SignalVersion
from headgate.tasks import DAG
from headgate.tasks.parsing import load_dags
from headgate.testing import run_on_signal, run_task

DOCUMENT = Path(__file__).parents[2] / "docs" / "signals.md"
BLOCK = re.compile(r"^```python\n# dags/(\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def dags_of(folder: Path) -> dict[str, DAG]:
    """Return the DAGs of the document."""
    dags: dict[str, DAG] = {}
    for name, source in BLOCK.findall(DOCUMENT.read_text()):
        (folder / name).write_text(source)
        dags |= load_dags(str(folder / name))
    return dags


def test_the_task_of_the_document_sends_what_it_says(tmp_path: Path) -> None:
    result = run_task(dags_of(tmp_path)["train"].tasks["train"], signals={"labels": ["a", "b"]})
    assert (result.value, result.error) == (1, "")
    assert result.signals == [
        SignalVersion("model", {"labels": 2}, "labels-1", 1),
        SignalVersion("trained", 1, None, 1),
        SignalVersion("drain", None, None, 1),
    ]


def test_the_tasks_of_the_document_hear_what_is_sent(tmp_path: Path) -> None:
    tasks = dags_of(tmp_path)["labels"].tasks
    sent = {"labels": ["a", "b", "c", "d", "e", "f", "done"]}
    assert run_task(tasks["count"], signals=sent).value == 2
    assert run_task(tasks["count"], signals={"labels": sent["labels"][:6]}).value == 2, "the timeout"
    assert run_task(tasks["collect"], signals=sent).value == sent["labels"]


def test_the_sensor_of_the_document_waits_for_what_the_task_sends(tmp_path: Path) -> None:
    tasks = dags_of(tmp_path)["evaluate"].tasks
    found = run_task(tasks["model"], signals={"model": [{"labels": 2}]})
    assert found.value == {"labels": 2}
    assert run_task(tasks["evaluate"], xcoms={"model": found.value}).value == 2


def test_the_rules_of_the_document_start_its_tasks(tmp_path: Path) -> None:
    tasks = dags_of(tmp_path)["follow"].tasks
    assert run_task(tasks["train"], signals={"samples": [7, 20_000, 8]}).value == ([20_000], [])
    sent: dict[str, list[Any]] = {"model": [{"drift": 0.1}, {"drift": 0.3}], "labels": ["a"]}
    assert run_task(tasks["check"], signals=sent).value == {"model": 2, "labels": 1}


def test_the_run_of_the_document_has_the_signals_that_meet_its_schedule(tmp_path: Path) -> None:
    score = dags_of(tmp_path)["score"].tasks["score"]
    assert run_task(score, signals={"model": [{"auc": 0.8}, {"auc": 0.95}]}).value == [2]
    assert run_task(score).value == []


def test_the_operator_of_the_document_decides(tmp_path: Path) -> None:
    retrain = dags_of(tmp_path)["gate"].tasks["retrain"]
    assert run_on_signal(retrain, {"model": [{"drift": 0.1}, {"drift": 0.3}]}) == [SignalAction.NONE, RESTART]
