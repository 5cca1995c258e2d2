"""What a trigger logs while a task waits for it, through real pairs: wherever it ran, it is in the task's log."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.integration.conftest import StartPair
from tests.store import ends
from tests.waiting import wait_until

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.values import encode_value
from headgate.store.store import Store
from headgate.store.tasks.deferral import Deferral
from headgate.supervisor.logs.task_log_files import read, tries

QUEUES = ("default",)
RUN_ID = "manual__2026-11-20T10:00:00+00:00"


def defer_tasks(store: Store, kwargs: dict[str, dict[str, Any]]) -> None:
    """Have tasks of these ids wait for triggers with these kwargs, as if a worker had deferred them."""
    epoch = store.register_triggerer(
        hostname="h", pid=1, machine="m", process_started=0.0, capacity=100, queues=("nothing of this",)
    )
    store.tasks.save_file(epoch, "etl.py", [DagSpec("etl", tasks=tuple(TaskSpec(each, "Op") for each in kwargs))])
    run = store.tasks.create_run("etl", RUN_ID)
    assert run is not None
    store.scheduling.plan(epoch)
    for task in store.tasks.dispatch(epoch, limit=100, queues=QUEUES).tasks:
        wait = Deferral(
            "users_triggers.Talker",
            encode_value(kwargs[task.task_id], where="kwargs"),
            "resume",
            encode_value({}, where="next_kwargs"),
        )
        assert ends.defer(store.tasks, epoch, task.id, task.token, wait)
    store.release_triggerer(epoch)


def events(home: Path, task_id: str, **fields: Any) -> list[str]:
    found = read(home / "logs", "etl", RUN_ID, task_id, 1)
    return [str(record["event"]) for record in found if fields.items() <= record.items()]


def wait_said(home: Path, task_id: str, event: str, times: int = 1) -> None:
    wait_until(lambda: events(home, task_id).count(event) >= times, f"{event!r} in the log of {task_id}")


def test_what_a_trigger_says_is_in_the_log_of_the_task_that_waits_for_it(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    go = {each: tmp_path / f"go-{each}" for each in ("a", "b")}
    defer_tasks(users_store, {each: {"name": each, "go": str(go[each])} for each in go})
    users_store.add_watcher("watcher", "users_triggers.Talker", {"name": "watcher", "go": str(tmp_path / "never")})
    pair = start_pair()
    for each in go:
        wait_said(tmp_path, each, f"{each} waits")
    pair.wait_log("watcher waits")
    for path in go.values():
        path.touch()
    for each in go:
        wait_said(tmp_path, each, "its trigger has ended")
    assert pair.stop() == 0
    pair.wait_log("leaving")

    for each in go:
        said = [f"{each} waits loudly", f"{each} waits", f"{each} has cleaned up"]
        assert events(tmp_path, each, source="trigger") == said
        long, *rest = events(tmp_path, each, source="output", logger="stdout")
        assert long == f"{each} prints \\xff"
        assert "".join(rest) == "x" * 100_000 + "half a line"
        assert events(tmp_path, each, source="output", logger="stderr") == [f"{each} complains"]
        assert events(tmp_path, each, source="supervisor") == ["its trigger is started", "its trigger has ended"]
        names = {record.get("trigger_name") for record in read(tmp_path / "logs", "etl", RUN_ID, each, 1)}
        assert names == {None, f"etl.{RUN_ID}.{each}"}
        assert tries(tmp_path / "logs", "etl", RUN_ID, each) == [1]
    # The supervisor's own log has what is worth a warning, and what belongs to no task.
    of_tasks = [record["event"] for record in pair.records if str(record.get("trigger_name")).startswith("etl.")]
    assert sorted(event for event in of_tasks if "waits" in event) == ["a waits loudly", "b waits loudly"]
    assert "a prints \\xff" not in of_tasks


def test_the_log_goes_on_when_the_runner_and_then_the_supervisor_is_killed(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    defer_tasks(users_store, {"a": {"name": "a", "go": str(go)}})
    first = start_pair()
    wait_said(tmp_path, "a", "a waits")
    os.kill(first.wait_ready(), signal.SIGKILL)
    wait_said(tmp_path, "a", "a waits", times=2)
    first.kill()
    second = start_pair()
    wait_said(tmp_path, "a", "a waits", times=3)
    go.touch()
    wait_said(tmp_path, "a", "its trigger has ended")
    assert second.stop() == 0
    said = [event for event in events(tmp_path, "a") if event in ("its trigger is started", "a waits")]
    assert said == ["its trigger is started", "a waits"] * 3
    assert "a has cleaned up" in events(tmp_path, "a")
    assert len(list((tmp_path / "logs").rglob("*.jsonl"))) == 2
