"""``headgate signals``, called as a user calls it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.signals.test_sending import new
from tests.store.signals.test_waits import Waits, sensor
from tests.supervisor.tasks_harness import Tasks

from headgate.client import Client
from headgate.protocol.messages.dags import DagSpec, SignalSchedule, TaskSpec
from headgate.protocol.messages.rules import SignalRule
from headgate.protocol.messages.signals import Predicate
from headgate.store.store import Store


def test_a_signal_is_sent_listed_and_shown(call_database: Any) -> None:
    assert call_database("signals", "list").out == "none\n"
    assert call_database("signals", "send", "model", '{"auc": 0.93}').out == "sent version 1 of model\n"
    (sent,) = call_database("signals", "send", "model", '"done"', "--dedup", "run-7", "--json").rows()
    assert sent == {"namespace": "default", "key": "model", "version": 2, "is_new": True}
    again = call_database("signals", "send", "model", "--dedup", "run-7")
    assert again.out == "version 2 of model was sent under the same name before: nothing is sent\n"
    rows = call_database("signals", "list", "model", "--json").rows()
    assert [(row["version"], row["value"]) for row in rows] == [(1, {"auc": 0.93}), (2, "done")]
    assert rows[1]["dedup"] == "run-7"
    listed = call_database("signals", "list", "model", "--wide").out
    assert ("run-7" in listed, "auto:" in listed) == (True, False), "names that people have given, and no others"
    assert rows[0]["sender"].startswith("command of ")
    assert '{"auc":0.93}' in call_database("signals", "list", "model").out
    (shown,) = call_database("signals", "show", "model", "--json").rows()
    assert (shown["versions"], shown["value"]) == (2, "done")
    (key,) = call_database("signals", "list", "--json").rows()
    assert (key["key"], key["last_version"]) == ("model", 2)


def test_versions_are_listed_from_a_place_on(call_database: Any) -> None:
    for number in range(5):
        call_database("signals", "send", "a", str(number), "--namespace", "mine")
    of = ("signals", "list", "a", "--namespace", "mine", "--json")
    assert [row["value"] for row in call_database(*of, "--after", "3").rows()] == [3, 4]
    assert [row["value"] for row in call_database(*of, "--newest", "2").rows()] == [3, 4]
    assert [row["value"] for row in call_database(*of, "--limit", "2").rows()] == [0, 1]
    assert "there is no key of signals named 'a'" in call_database("signals", "list", "a").err


def test_values_are_printed_as_json(call_database: Any) -> None:
    values = ['"20"', "20", "true", '""', '["a","b"]', "null"]
    for value in values:
        call_database("signals", "send", "a", value)
        (shown,) = [
            line for line in call_database("signals", "show", "a").out.splitlines() if line.startswith("value ")
        ]
        assert shown.split() == ["value", value]
    listed = call_database("signals", "list", "a").out.splitlines()
    assert [line.split()[1] for line in listed[1:]] == values
    wide = call_database("signals", "list", "a", "--wide").out.splitlines()
    assert [line.split()[3] for line in wide[1:]] == values
    heard = call_database("signals", "listen", "a", "--after", "0", "--follow", "--timeout", "0").out.splitlines()
    assert [line.split()[-1] for line in heard] == values


def test_a_signal_is_sent_to_one_run(call_database: Any, etl: Tasks) -> None:
    assert call_database("signals", "send", "a", "--run", "etl", "latest").out == "sent version 1 of a\n"
    (row,) = call_database("signals", "list", "a", "--json").rows()
    assert (row["dag"], row["run_id"]) == ("etl", "r1")
    assert "there is no run named 'r2'" in call_database("signals", "send", "a", "--run", "etl", "r2").err
    etl.store.tasks.cancel_run(etl.run)
    called = call_database("signals", "send", "a", "--run", "etl", "latest")
    ended = "run r1 of etl has ended (failed): nothing in it waits for the signal\n"
    assert (called.code, called.out) == (0, f"sent version 2 of a\n{ended}")


def test_a_signal_starts_a_run_with_it(call_database: Any, etl: Tasks) -> None:
    called = call_database("signals", "send", "a", "1", "--start", "etl")
    assert called.out == "sent version 1 of a\na run of etl is open already\n"
    etl.store.tasks.cancel_run(etl.run)
    etl.store.tasks.set_paused("etl", is_paused=True)
    called = call_database("signals", "send", "a", "2", "--start", "etl")
    assert called.out.splitlines()[0] == "sent version 2 of a"
    assert called.out.splitlines()[1].startswith("created run manual__2")
    assert "the DAG is paused: the run waits for `headgate dags unpause etl`" in called.out
    (row,) = call_database("signals", "send", "a", "3", "--start", "etl", "--json").rows()
    assert (row["version"], row["run_id"]) == (3, None)


def test_a_dag_on_signals_says_what_it_waits_for(call_database: Any, etl: Tasks) -> None:
    rule = SignalRule("model", predicate=Predicate("at_least", b"3"))
    batch = SignalSchedule((rule,), "batch", 3)
    tasks = (TaskSpec("a", "Op"),)
    spec = DagSpec("eval", batch, tasks=tasks, end_on=(SignalRule("drain", action="STOP"),))
    store = etl.store
    store.tasks.save_file(etl.epoch, "eval.py", [spec])

    def settle() -> None:
        while store.scheduling.consider_signals(etl.epoch).has_more:
            pass
        store.scheduling.create_event_runs(etl.epoch)
        store.scheduling.plan(etl.epoch)

    assert "the DAG eval: no signal waits for a run" in call_database("why", "eval").out
    call_database("signals", "send", "model", "4")
    call_database("signals", "send", "model", "2")
    settle()
    (why,) = call_database("why", "eval", "--json").rows()
    assert why["reason"] == "contract"
    assert why["headline"] == "the DAG eval: 1 signal waited for a run of 3 signals of 'model', at_least 3"
    assert why["next"] == "a run is created when 2 more have come"
    (shown,) = call_database("dags", "show", "eval", "--json").rows()
    place = {"rule": "'model', at_least 3", "seen_version": 2, "last_version": 2, "waiting": 1}
    assert (shown["signals"], shown["end_on"], shown["waiting_events"]) == ([place], ["'drain'"], 1)
    assert (
        "held against 2 of 2 versions; 1 signal that met it waited for runs"
        in call_database("dags", "show", "eval").out
    )
    (key,) = call_database("signals", "show", "model", "--json").rows()
    assert [(one["dag"], one["run_id"], one["task_id"]) for one in key["waiting"]] == [("eval", None, None)]
    store.tasks.set_paused("eval", is_paused=True)
    (why,) = call_database("why", "eval", "--json").rows()
    assert (why["reason"], why["next"]) == ("paused", "`headgate dags unpause eval`")
    store.tasks.set_paused("eval", is_paused=False)
    for value in ("5", "6"):
        call_database("signals", "send", "model", value)
    settle()
    (run,) = call_database("runs", "show", "eval", "latest", "--json").rows()
    assert (run["run_type"], run["signals"]) == ("signal", [f"version {n} of model" for n in (1, 3, 4)])
    assert run["end_on"] == ["'drain'; held against 0 of 0 versions"]
    assert "there is no DAG, trigger or watcher named 'nothing'" in call_database("why", "nothing").err


def test_a_listener_prints_what_is_there_and_what_comes(call_database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        call_database("signals", "send", "a", str(number))
    (row,) = call_database("signals", "listen", "a", "--after", "1", "--json").rows()
    assert (row["version"], row["value"]) == (2, 1)
    called = call_database("signals", "listen", "a", "--after", "1", "--follow", "--timeout", "0")
    assert [line.split()[-2:] for line in called.out.splitlines()] == [["2", "1"], ["3", "2"]]
    none = call_database("signals", "listen", "a", "--timeout", "0")
    assert (none.code, none.err) == (1, "headgate: no version of a came within 0 s\n")
    real = Client.listen_signal

    def listen(client: Client, key: str, **where: Any) -> Any:
        found = real(client, key, **where | {"idle_s": 60.0})
        call_database("signals", "send", "a", '"came"')
        return found

    monkeypatch.setattr(Client, "listen_signal", listen)
    (row,) = call_database("signals", "listen", "a", "--json").rows()
    assert (row["version"], row["value"]) == (4, "came")


def test_a_key_is_shown_with_the_tasks_that_wait_for_it(call_database: Any, users_store: Store, query: Query) -> None:
    waits = Waits(users_store, query, sensor(value="x"))
    waits.send("a")
    waits.consider()
    (shown,) = call_database("signals", "show", "labels", "--json").rows()
    of_task = {"dag": "etl", "run_id": "r1", "task_id": "wait", "seen_version": 1}
    assert shown["waiting"] == [of_task | {"has_rule": False, "waits": True, "is_asked": False, "error": None}]
    assert call_database("signals", "show", "labels").out.splitlines()[-1].split() == ["etl", "r1", "wait", "1"]
    called = call_database("signals", "forget", "labels")
    assert (called.code, "the key 'labels' is in use" in called.err) == (1, True)


def test_a_number_that_python_does_not_write_is_shown_in_hexadecimal(call_database: Any, users_store: Store) -> None:
    users_store.signals.send([new("a", 10**5000), new("a", 1)])
    shown = hex(10**5000)
    assert [row["value"] for row in call_database("signals", "list", "a", "--json").rows()] == [shown, 1]
    assert shown[:20] in call_database("signals", "list", "a").out
    assert shown[:20] in call_database("signals", "listen", "a", "--after", "0").out
    users_store.signals.send([new("a", 10**5000)])
    assert shown[:20] in call_database("signals", "show", "a").out


def test_a_key_is_forgotten(call_database: Any) -> None:
    call_database("signals", "send", "a")
    assert call_database("signals", "forget", "a").out == "forgot a with 1 version\n"
    gone = call_database("signals", "forget", "a")
    assert (gone.code, "there is no key of signals named 'a'" in gone.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("send", "a", "{"), "JSON: "),
        (("send", "a", "ready"), """char 0); a text needs quotes: '"ready"'\n"""),
        (("send", "a", 'say "hi"'), """a text needs quotes: '"say \\"hi\\""'\n"""),
        (("send", ""), "the key of a signal '' must have 1..512 characters"),
        (("send", "a", "1", "--dedup", ""), "the dedup of the signal"),
        (("send", "a", '"' + "x" * 50_000 + '"'), "the limit is 49,152"),
        (("send", "a", "1", "--namespace", "n" * 101), "the namespace"),
        (("list", "--after", "3"), "name it"),
        (("list", "a", "--after", str(2**63)), "expected 9223372036854775807 or less"),
        (("listen", "a", "--after", str(2**64)), "expected 9223372036854775807 or less"),
        (("list", "a", "--newest", "3", "--after", "3"), "--newest goes with none of"),
        (("listen", ""), "the key of a signal"),
        (("send", "a", "--start", "nothing"), "there is no DAG named 'nothing'"),
        (("send", "a", "--start", "d", "--run", "d", "r"), "--start goes without --run"),
        (("show", "nothing"), "there is no key of signals named 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_told(call_database: Any, arguments: Any, problem: str) -> None:
    called = call_database("signals", *arguments)
    assert called.code != 0
    assert problem in called.err
