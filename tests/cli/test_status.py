"""`headgate status`, called as a user calls it: what it prints, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.store.harness import register

from headgate.cli.commands import status as status_module
from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger
from headgate.scheduling.why import DagFolder, RunnerEnds
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway, StoreError
from headgate.store.facts.supervisor_status import StreamStatus, SupervisorStatus, encode_status
from headgate.store.store import Store
from headgate.supervisor.serve import machine_identity, start_of_process


def fail(store: Store, epoch: Any, *names: str) -> None:
    ids = [store.add_watcher(name, "a.B", {}) for name in names]
    store.claim_triggers(epoch, limit=100, queues=("default",))
    error = ("KeyError: 'a\x1b[31m'", "Traceback (most recent call last):\n  File x\nKeyError: 'a'")
    store.store_slice(epoch, finished=[FinishedTrigger(id_, f"run {id_}", "failed", 0, *error) for id_ in ids])


def test_everything_is_well_is_exit_code_0(call_database: Any, users_store: Store) -> None:
    register(users_store)
    called = call_database("status")
    assert (called.code, called.out, called.err) == (0, "everything is well\n", "")
    assert call_database("status", "--json").out == ""


def test_what_a_person_should_look_at_is_exit_code_1(call_database: Any, users_store: Store) -> None:
    fail(users_store, register(users_store), "w")
    called = call_database("status")
    assert called.code == 1
    first, second = called.out.splitlines()
    assert first.startswith("attention: 1 trigger is failing, and started again and again: w, it has failed once, the")
    assert first.endswith("ago: KeyError: 'a\\x1b[31m'")
    assert second == "  next: headgate why w"


def test_what_stands_still_is_exit_code_2_and_comes_first(call_database: Any, users_store: Store) -> None:
    epoch = register(users_store, queues=("default",))
    fail(users_store, epoch, "w")
    users_store.add_watcher("elsewhere", "a.B", {}, queue="gpu")
    called = call_database("status", "--json")
    assert called.code == 2
    assert [(row["severity"], row["reason"]) for row in called.rows()] == [
        ("broken", "queue_unserved"),
        ("attention", "failing"),
    ]
    assert set(called.rows()[0]) == {"severity", "reason", "text", "next", "details"}


def test_verbose_prints_every_name(call_database: Any, users_store: Store) -> None:
    names = [f"w{number}" for number in range(7)]
    fail(users_store, register(users_store), *names)
    assert "and 2 more" in call_database("status").out
    assert "    w6: it has failed once" not in call_database("status").out
    told = call_database("status", "--verbose").out
    assert all(f"    {name}: it has failed once" in told for name in names)


def test_a_paused_watcher_is_told_and_is_well(call_database: Any, users_store: Store) -> None:
    register(users_store)
    users_store.add_watcher("w", "a.B", {})
    users_store.pause_watcher("w")
    called = call_database("status")
    assert called.code == 0
    assert called.out.startswith("everything is well\nnotice: 1 trigger is paused by a user: w, ")


def test_a_supervisor_of_this_machine_whose_process_is_gone_is_gone_at_once(
    call_database: Any, users_store: Store
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    here = machine_identity()
    register(users_store, pid=process.pid, machine=here, process_started=1.0)
    users_store.add_watcher("w", "a.B", {})
    called = call_database("status")
    assert called.code == 2
    assert f"(pid {process.pid} on h) is gone" in called.out
    register(users_store, pid=os.getpid(), machine=here, process_started=start_of_process("self"))
    called = call_database("status")
    assert called.code == 1
    assert "is gone; another takes its triggers over" in called.out


def test_a_database_that_is_read_only_is_exit_code_3_if_no_supervisor_is_alive(
    call: Any, make_migrated_postgres_url: Callable[[], str], home: Path
) -> None:
    url = make_migrated_postgres_url()
    with Store(open_engine(url), secrets=Secrets.open(home, None, makes_file=True)) as store:
        epoch = register(store)
        assert call("--db", url, "status").code == 0  # and the key is registered
        with store.database.writing() as tx:
            name = tx.connection.exec_driver_sql("SELECT current_database()").scalar_one()
            tx.connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        assert call("--db", url, "status").code == 0  # one is alive, so it writes: this session alone cannot
        store.release_triggerer(epoch)
    called = call("--db", url, "status")
    assert (called.code, called.out) == (3, "")
    assert f"{name} is read-only: default_transaction_read_only is on" in called.err


def test_a_database_that_cannot_be_used_is_exit_code_3(call: Any, tmp_path: Path, home: Path) -> None:
    missing = call("--db", f"sqlite:///{tmp_path / 'none.db'}", "status")
    assert (missing.code, missing.out) == (3, "")
    assert "run `headgate db upgrade`" in missing.err
    (tmp_path / "empty.db").touch()
    assert call("--db", f"sqlite:///{tmp_path / 'empty.db'}", "status").code == 3
    assert call("db", "upgrade").code == 0
    (home / "fernet.key").unlink(missing_ok=True)
    assert call("status").code == 3


def test_streams_are_listed_and_shown_with_those_that_they_wait_for(call_database: Any, users_store: Store) -> None:
    epoch = register(users_store)
    fail(users_store, epoch, "w", "x")
    of_log = [DescribedTrigger(users_store.inspect.find_trigger(name), f"d {name}", "d", "the log") for name in "wx"]
    users_store.claim_triggers(epoch, limit=100, queues=("default",))
    users_store.store_slice(epoch, described=of_log)
    (row,) = call_database("streams", "list", "--json").rows()
    assert (row["name"], row["subscribers"], row["missing"]) == ("the log", 2, 2)
    assert "the log" in call_database("streams", "list").out
    shown = call_database("streams", "show", "x")
    assert (shown.code, shown.err) == (0, "")
    assert "it has failed once" in shown.out
    assert "last error:\n  KeyError: 'a\\x1b[31m'" in shown.out
    assert "as its supervisor said" not in shown.out
    said = StreamStatus(
        *("d", 3, 4, 2, 1, 1, 3 * 1024 * 1024, "bytes", "absent subscriber", 1.5, (of_log[0].trigger_id,)),
    )
    users_store.heartbeat(epoch, encode_status(SupervisorStatus(streams=(said,), streams_in_all=1)))
    listed = call_database("streams", "list").out
    assert "3 MiB" in listed
    assert "w (absent subscriber, 1970-01-01)" in listed
    shown = call_database("streams", "show", "x")
    for words in ("as its supervisor said", "1 online, 1 absent", "0 accepted, 0 failed, 0 rejected"):
        assert words in shown.out
    (found,) = call_database("streams", "show", str(row["id"]), "--json").rows()
    assert (found["live"]["lag"], found["live"]["held_by"]) == (3 * 1024 * 1024, ["w"])
    assert [reader["name"] for reader in found["readers"]] == ["w", "x"]
    assert call_database("streams", "show", "nothing").code == 1


def test_supervisors_are_listed_with_their_states_and_how_their_runners_ended(
    call_database: Any, users_store: Store, query: Any
) -> None:
    old, epoch = register(users_store), register(users_store)
    users_store.release_triggerer(old)
    query("UPDATE triggerer SET stopped_at = :then WHERE id = :id", then="2026-01-01 00:00:00.000000", id=old)
    ends = RunnerEnds(3, 600.0, "killed by SIGKILL")
    users_store.heartbeat(epoch, encode_status(SupervisorStatus(runner="running", runner_ends=ends)))
    (row,) = call_database("triggerers", "list", "--json").rows()
    assert (row["id"], row["state"], row["runner"]) == (epoch, "running", "running")
    assert row["runner_ends"] == {"times": 3, "within_s": 600.0, "last": "killed by SIGKILL", "wait_s": 0.0}
    assert "running; ended 3 times" in call_database("triggerers", "list").out
    assert row["dag_files"] is None
    status = SupervisorStatus(runner="running", dag_folder=DagFolder("where", "0123456789", 0.0))
    users_store.heartbeat(epoch, encode_status(status))
    (row,) = call_database("triggerers", "list", "--json").rows()
    assert row["dag_files"] == "01234567"
    assert row["dag_files_since"].startswith("1970-01-01T00:00:00")
    assert "01234567" in call_database("triggerers", "list", "--wide").out
    everything = call_database("triggerers", "list", "--all", "--json").rows()
    assert [each["state"] for each in everything] == ["running", "stopped"]


def test_top_prints_one_screen_if_the_output_is_no_terminal(call_database: Any, users_store: Store) -> None:
    epoch = register(users_store)
    fail(users_store, epoch, "w", "x")
    users_store.claim_triggers(epoch, limit=100, queues=("default",))
    described = DescribedTrigger(users_store.inspect.find_trigger("w"), "d w", "d", "the log")
    users_store.store_slice(epoch, described=[described])
    said = StreamStatus("d", in_flight=3, lag=1234, held="absent subscriber", held_by=(described.trigger_id,))
    status = SupervisorStatus(runner="running", owned=2, streams=(said,), streams_in_all=1)
    users_store.heartbeat(epoch, encode_status(status))
    printed = call_database("top")
    assert (printed.code, printed.err) == (0, "")
    lines = [line.split() for line in printed.out.splitlines()]
    assert any(line[:1] == ["headgate"] and line[-3:] == ["to", "look", "at"] for line in lines)
    assert any(line[:1] == ["attention"] for line in lines)
    supervisor = next(line for line in lines if line[:1] == [str(epoch)])
    assert " ".join(supervisor[3:]).startswith("alive 2 of 10")
    ends = RunnerEnds(1, 600.0, "killed by SIGKILL")
    users_store.heartbeat(epoch, encode_status(SupervisorStatus(runner="absent", runner_ends=ends, is_draining=True)))
    printed = call_database("top")
    assert "absent; ended 1 time within 10 min" in printed.out
    assert any(line.split()[3:4] == ["draining"] for line in printed.out.splitlines())
    stream = next(line for line in lines if line[:2] == ["the", "log"])
    assert " ".join(stream[2:]).startswith("0 of 1 1,234 3 w (absent subscriber)")


def test_top_goes_on_until_it_is_interrupted_and_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=StringIO(), force_terminal=True, width=100)
    looks: list[str | StoreError] = ["the first", DatabaseAway("the database", "no answer"), "the third"]
    waited: list[float] = []

    def look() -> str:
        found = looks.pop(0)
        if isinstance(found, StoreError):
            raise found
        return found

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if not looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("headgate.cli.commands.status.time.sleep", sleep)
    status_module._watch(out, look, 0.5)
    assert waited == [0.5] * 3
    assert isinstance(out.file, StringIO)
    for words in ("the first", "no answer", "the third"):
        assert words in out.file.getvalue()
