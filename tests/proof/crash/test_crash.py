"""A handful of the cells of both matrices, for every change; ``python -m tests.proof.crash`` runs all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.postgres import why_none
from tests.proof.crash.campaign import RUNNERLESS_MARKS, Campaign, is_possible
from tests.proof.crash.databases import Databases
from tests.proof.crash.faults import SERVER_FAULTS
from tests.proof.crash.matrix import plans
from tests.proof.crash.proof import LAYOUTS
from tests.proof.crash.workload import Fault, Workload
from tests.proof.crash.workloads.maps import MapWorkload
from tests.proof.crash.workloads.pair import HarmWorkload, PairWorkload
from tests.proof.crash.workloads.programs import ProgramWorkload
from tests.proof.crash.workloads.signals import SignalWorkload
from tests.proof.crash.workloads.task_streams import StreamWorkload
from tests.proof.crash.workloads.tasks import TASKS, TaskWorkload
from tests.proof.history import map_history, stream_history, task_history
from tests.proof.history.task_records import decode_lines

from headgate.protocol.marks import TASK_MARKS
from headgate.store.db.engine import open_engine
from headgate.testing.crash import history

pytestmark = pytest.mark.campaign

StartCampaign = Callable[..., Campaign]
Cells = list[tuple[str, Fault]]

# The points at which the promise is decided, each with the fault that would break it there.
OF_PAIR: dict[str, Cells] = {
    "sqlite": [
        ("store.committed", "kill supervisor"),
        ("runner.frame_half_sent", "kill runner"),
        ("filelog.draft_written", "kill both"),
        ("supervisor.frame_half_sent", "kill supervisor"),
        ("session.started", "kill runner"),
    ],
    "postgresql": [
        ("store.before_commit", "drop connection"),
        ("store.begun", "database away"),
        ("store.before_commit", "kill supervisor"),
        ("group.before_advance", "kill both"),
        ("leases.claim_written", "kill runner"),
        ("store.committed", "stop"),
    ],
}
OF_TASKS: dict[str, Cells] = {
    "sqlite": [("defer.committed", "kill supervisor"), ("bells.unrung", "kill supervisor")],
    "postgresql": [("resume.by_event", "drop connection"), ("resume.committed", "kill all")],
}
OF_STREAMS: dict[str, Cells] = {
    "sqlite": [("stream.handled_committed", "kill supervisor"), ("stream.reopened", "kill all")],
    "postgresql": [("stream.handled_written", "drop connection"), ("host.no_credit", "kill runner")],
}
OF_MAPS: dict[str, Cells] = {
    "sqlite": [
        ("maps.committed", "kill supervisor"),
        ("worker.outcome_half_sent", "kill workers"),
        ("elements.appended", "kill supervisor"),
    ],
    "postgresql": [
        ("maps.expanded", "drop connection"),
        ("outcomes.grouped", "kill all"),
        ("elements.absorbed", "kill all"),
    ],
}
OF_SIGNALS: dict[str, Cells] = {
    "sqlite": [
        ("signals.sent_committed", "kill workers"),
        ("signals.action_written", "kill supervisor"),
        ("runs.of_events_written", "kill supervisor"),
        ("endless.moved", "kill all"),
    ],
    "postgresql": [
        ("signals.action_written", "drop connection"),
        ("signals.sent_committed", "kill all"),
        ("signals.run_ending", "drop connection"),
        ("endless.moved", "kill supervisor"),
    ],
}
OF_HARM: dict[str, Cells] = {
    "sqlite": [
        ("strikes.passed_over", "kill supervisor"),
        ("letters.passed_over", "kill both"),
        ("redelivery.read", "kill supervisor"),
        ("redelivery.given", "kill runner"),
        ("holds.written", "kill supervisor"),
    ],
    "postgresql": [
        ("strikes.passed_over", "drop connection"),
        ("letters.passed_over", "kill supervisor"),
        ("redelivery.stored", "drop connection"),
        ("redelivery.settled", "kill both"),
        ("holds.stored", "kill supervisor"),
    ],
}
OF_PROGRAMS: dict[str, Cells] = {
    "sqlite": [
        ("redrive.event_stored", "kill program"),
        ("redrive.committed", "kill both"),
        ("consumer.place_moved", "kill program"),
        ("consumer.failure_counted", "kill program"),
    ],
    "postgresql": [
        ("redrive.written", "drop connection"),
        ("redrive.trigger_found", "kill supervisor"),
        ("consumer.committed", "kill program"),
        ("consumer.block_done", "kill runner"),
    ],
}
DIALECTS = ["sqlite", "postgresql"]


def run_cells(campaign: Campaign, cells: Cells) -> list[Counter[str]]:
    """Run cells, of which each has to be good; return their counts."""
    counts = []
    for mark, fault in cells:
        result = campaign.run_cell(mark, fault)
        assert result.is_good, str(result)
        counts.append(result.counts)
    return counts


@pytest.mark.parametrize("dialect", OF_PAIR)
def test_nothing_is_lost_or_stored_twice_whatever_dies_at_a_mark(start_campaign: StartCampaign, dialect: str) -> None:
    campaign = start_campaign(PairWorkload, dialect, subscribers=3, seed=1)
    for counts in run_cells(campaign, OF_PAIR[dialect]):
        assert counts["events"]
    assert campaign.finish() is None
    replayed = campaign.replay()
    assert replayed.is_good, str(replayed)
    assert replayed.counts["frames"]


@pytest.mark.parametrize("dialect", OF_HARM)
def test_what_a_trigger_cannot_take_is_a_letter_and_what_ends_the_runner_is_quarantined_whatever_dies(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(HarmWorkload, dialect, subscribers=3, seed=6)
    run_cells(campaign, OF_HARM[dialect])
    counts = campaign.counted
    assert counts["passed_over"]
    assert counts["redriven"]
    assert counts["quarantined"]
    assert campaign.finish() is None


@pytest.mark.parametrize("dialect", OF_PROGRAMS)
def test_every_letter_is_redriven_once_and_every_event_handed_over_once_whatever_dies(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(ProgramWorkload, dialect, subscribers=3, seed=7)
    run_cells(campaign, OF_PROGRAMS[dialect])
    result = campaign.run_random(4)
    assert result.is_good, str(result)
    counts = campaign.counted
    assert counts["redriven"]
    assert counts["handed_over"] == 3 * counts["events"]
    assert campaign.finish() is None


def test_what_is_wrong_with_letters_and_in_the_table_of_the_user_is_found(
    start_campaign: StartCampaign, sqlite_url: str
) -> None:
    campaign = start_campaign(ProgramWorkload, "sqlite", subscribers=1, seed=8)
    result = campaign.run_cell("redrive.committed", "kill program")
    assert result.is_good, str(result)
    assert result.counts["redriven"]
    engine = open_engine(sqlite_url)
    with engine.begin() as connection:
        for statement in (
            "DELETE FROM letter_action WHERE id = 1",
            "UPDATE trigger_event SET kind = 'success' WHERE id = (SELECT min(event_id) FROM dead_letter)",
            "INSERT INTO users_bill (watcher, event_id, payload) SELECT watcher, event_id, payload FROM users_bill "
            "WHERE n = 3",
            "DELETE FROM users_bill WHERE n = 2",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()
    campaign.complete_s_max = 0.5
    result = campaign.run_cell("no.such_mark", "kill runner")
    assert {finding.kind for finding in result.findings} >= {
        "redriven without a record",
        "redriven without its event",
        "handed over twice",
        "never handed over",
        "handed over out of order",
    }


@pytest.mark.parametrize("dialect", OF_TASKS)
def test_every_task_is_resumed_once_and_ends_once_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(TaskWorkload, dialect, seed=1)
    for counts in run_cells(campaign, OF_TASKS[dialect]):
        assert counts["deferrals"]
        assert counts["tasks"] >= 2 * len(TASKS)
    if dialect == "sqlite":  # a supervisor takes its time to cancel what is over
        assert campaign.finish() is None


@pytest.mark.parametrize("dialect", OF_STREAMS)
def test_every_event_of_a_stream_is_handled_once_and_in_order_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(StreamWorkload, dialect, seed=9)
    for counts in run_cells(campaign, OF_STREAMS[dialect]):
        assert counts["events"] >= stream_history.TOTAL * len(StreamWorkload.tasks)
    if dialect == "sqlite":
        assert campaign.finish() is None


@pytest.mark.parametrize("dialect", OF_MAPS)
def test_every_value_has_one_instance_that_succeeds_once_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(MapWorkload, dialect, seed=13)
    for counts in run_cells(campaign, OF_MAPS[dialect]):
        assert counts["executions"] >= counts["instances"] > 0
    if dialect == "sqlite":
        assert campaign.finish() is None


@pytest.mark.parametrize("dialect", OF_SIGNALS)
def test_every_signal_has_one_version_and_every_wait_its_first_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str
) -> None:
    campaign = start_campaign(SignalWorkload, dialect, seed=14)
    for counts in run_cells(campaign, OF_SIGNALS[dialect]):
        assert counts["signals"] > counts["waits"] > 0
        assert counts["acknowledged"]
    if dialect == "sqlite":
        assert campaign.finish() is None


@pytest.mark.parametrize(
    ("workload", "mark", "bug", "kind"),
    [
        (StreamWorkload, "stream.handled_written", "place_moved_without_the_outcome", "event left out"),
        (StreamWorkload, "stream.handled_written", "state_not_that_of_the_place", "state of another history"),
        (StreamWorkload, "stream.handled_written", "retry_from_the_first_event", "handled twice"),
        (StreamWorkload, "stream.handled_written", "credit_ignored", "beyond its credit"),
        (MapWorkload, "worker.step_done", "instance_left_out", "value left out"),
        (MapWorkload, "worker.step_done", "values_of_others", "wrong values"),
        (MapWorkload, "plan.in_trigger", "value_of_another_in_its_trigger", "wrong values"),
        (MapWorkload, "tasks.outcome_stored", "map_ended_with_its_first_window", "value left out"),
        (MapWorkload, "elements.committed", "elements_of_every_try", "instance of no value"),
        (MapWorkload, "elements.absorbed", "first_element_twice", "instance of no value"),
        (MapWorkload, "elements.appended", "keys_of_appends_forgotten", "appended wrongly"),
        (MapWorkload, "groups.advanced", "group_all_at_once", "begun out of order"),
        (SignalWorkload, "signals.sent_committed", "sent_before_the_outcome", "sent without its outcome"),
        (SignalWorkload, "signals.sent_committed", "dedup_of_each_send", "version missing"),
        (SignalWorkload, "signals.considered", "signals_from_before_the_run", "considered before its time"),
        (SignalWorkload, "signals.action_written", "start_forgotten_while_it_is_under_way", "start lost"),
        (SignalWorkload, "signals.sent_committed", "signal_of_a_dag_passed_over", "start lost"),
        (SignalWorkload, "signals.sent_committed", "signal_of_a_dag_in_two_runs", "acted twice"),
    ],
)
def test_a_bug_in_streams_of_tasks_in_mapped_tasks_and_in_signals_is_found(
    start_campaign: StartCampaign, tmp_path: Path, workload: type[Workload], mark: str, bug: str, kind: str
) -> None:
    campaign = start_campaign(workload, "sqlite", seed=11)
    (tmp_path / "campaign" / "control" / "bug").write_text(bug)
    result = campaign.run_cell(mark, "kill workers")
    assert not result.error
    assert result.count(kind), str(result)


def test_what_is_wrong_with_instances_is_found(start_campaign: StartCampaign, sqlite_url: str, tmp_path: Path) -> None:
    campaign = start_campaign(MapWorkload, "sqlite", seed=12)
    result = campaign.run_random(1)
    assert result.is_good, str(result)
    engine = open_engine(sqlite_url)
    of_list = "SELECT id FROM task_instance WHERE task_id = 'of_list' AND map_index"
    with engine.begin() as connection:
        for statement in (
            f"DELETE FROM xcom WHERE task_instance_id IN ({of_list} = 2)",
            f"UPDATE task_instance SET map_index = 8 WHERE id = ({of_list} = 7 LIMIT 1)",
            "UPDATE dag_run SET ended_at = NULL WHERE id = 1",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()
    campaign.complete_s_max = 0.5
    result = campaign.run_cell("no.such_mark", "kill workers")
    wrong = {"lost outcome", "instance of no value", "wrong values", "run ended twice"}
    assert {finding.kind for finding in result.findings} >= wrong
    kept = tmp_path / "campaign" / "history.jsonl"
    again = map_history.check(map_history.decode_lines(kept.read_bytes()))
    assert {finding.kind for finding in again.findings} >= wrong


def test_what_is_wrong_with_the_stream_of_a_task_is_found(
    start_campaign: StartCampaign, sqlite_url: str, tmp_path: Path
) -> None:
    campaign = start_campaign(StreamWorkload, "sqlite", seed=10)
    result = campaign.run_random(1)
    assert result.is_good, str(result)
    engine = open_engine(sqlite_url)
    endless = "(SELECT trigger_id FROM task_stream WHERE task_instance_id = 6)"
    part = "FROM xcom WHERE task_instance_id = 2 AND key LIKE 'part %'"
    with engine.begin() as connection:
        for statement in (
            "DELETE FROM xcom WHERE task_instance_id = 1",
            f"INSERT INTO xcom SELECT task_instance_id, 'part x', value, stored_at {part} LIMIT 1",
            "UPDATE task_stream SET handled = handled - 1 WHERE task_instance_id = 3",
            "UPDATE task_stream SET handled_to = 0, ahead = 3 WHERE task_instance_id = 4",
            f"UPDATE trigger SET finished_at = NULL WHERE id = {endless}",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()
    campaign.complete_s_max = 0.5
    result = campaign.run_cell("no.such_mark", "kill runner")
    wrong = {"event left out", "handled twice", "state of another history", "beyond its credit", "trigger left behind"}
    assert {finding.kind for finding in result.findings} >= wrong
    kept = tmp_path / "campaign" / "history.jsonl"
    again = stream_history.check(stream_history.decode_lines(kept.read_bytes()))
    assert {finding.kind for finding in again.findings} >= wrong


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_nothing_is_lost_or_stored_twice_when_the_server_crashes_at_a_mark(tmp_path: Path) -> None:
    databases = Databases(tmp_path)
    folder = tmp_path / "campaign"
    folder.mkdir()
    try:
        with databases.one("postgresql", folder, needs_server=True) as (url, server):
            with Campaign(PairWorkload(folder, url, 1), seed=5, server=server) as campaign:
                result = campaign.run_cell("store.before_commit", "crash server")
                assert result.is_good, str(result)
                assert result.counts["dropped_busy"] == 1, "its connection was in a transaction"
                assert campaign.finish() is None
    finally:
        databases.close()


def test_nothing_is_lost_or_stored_twice_whatever_dies_at_random(start_campaign: StartCampaign) -> None:
    campaign = start_campaign(PairWorkload, "sqlite", subscribers=1, seed=2)
    result = campaign.run_random(8)
    assert result.is_good, str(result)
    assert result.counts["kills"] >= 8
    assert campaign.finish() is None


def test_a_cell_whose_mark_is_not_reached_fails(start_campaign: StartCampaign) -> None:
    campaign = start_campaign(PairWorkload, "sqlite", subscribers=1, seed=3, complete_s_max=2.0)
    result = campaign.run_cell("nowhere.at_all", "kill runner")
    assert not result.is_good
    assert "nowhere.at_all" in result.error


def test_a_cell_whose_mark_is_not_reached_fails_and_what_is_wrong_in_the_tables_is_found(
    start_campaign: StartCampaign, sqlite_url: str, tmp_path: Path
) -> None:
    campaign = start_campaign(TaskWorkload, "sqlite", seed=2, complete_s_max=15.0)
    result = campaign.run_random(1)
    assert result.is_good, str(result)
    assert result.counts["kills"]
    engine = open_engine(sqlite_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM xcom WHERE key = 'step_2'")
        connection.exec_driver_sql("UPDATE trigger SET finished_at = NULL WHERE id = 1")
    engine.dispose()
    campaign.complete_s_max = 0.5
    result = campaign.run_cell("no.such_mark", "kill runner")
    assert "no.such_mark" in result.error
    assert {finding.kind for finding in result.findings} >= {"lost outcome", "trigger left behind"}
    kept = tmp_path / "campaign" / "history.jsonl"
    again = task_history.check(decode_lines(kept.read_bytes()))
    assert {finding.kind for finding in again.findings} >= {"lost outcome", "trigger left behind"}


def test_a_producer_that_commits_too_early_is_found_out_and_its_history_kept(
    start_campaign: StartCampaign, tmp_path: Path
) -> None:
    campaign = start_campaign(PairWorkload, "sqlite", subscribers=1, seed=4, trigger="HastyTrigger", complete_s_max=5.0)
    result = campaign.run_cell("host.event_bound", "kill runner")
    assert result.count("lost")
    assert result.count("commit past a failed offset")
    kept = tmp_path / "campaign" / "history.jsonl"
    again = history.check(history.decode_lines(kept.read_bytes()))
    assert again.count("lost") == result.count("lost")


@pytest.mark.parametrize("workload", LAYOUTS, ids=lambda workload: workload.name)
def test_the_matrix_holds_every_mark_with_every_fault_and_all_numbers_of_subscribers(workload: type[Workload]) -> None:
    todo = plans(workload, DIALECTS, None, kills=95, seed=0, repeat=2)
    cells = Counter((plan.mark, plan.dialect, plan.subscribers, fault) for plan in todo for fault in plan.faults)
    assert cells == Counter(
        {
            (mark, dialect, count, fault): 2
            for mark in workload.marks
            for dialect in DIALECTS
            for count in workload.subscriber_counts
            for fault in workload.faults
            if is_possible(mark, fault, dialect)
        }
    )
    assert sum(plan.kills for plan in todo) == 95
    impossible = {
        mark for mark in workload.marks for fault in workload.faults if not is_possible(mark, fault, "postgresql")
    }
    assert impossible <= set(RUNNERLESS_MARKS)
    assert PairWorkload.subscriber_counts == (1, 3)
    assert TASK_MARKS.keys() <= TaskWorkload.marks.keys()


def test_a_server_is_restarted_only_where_it_is_our_own() -> None:
    todo = plans(PairWorkload, DIALECTS, None, kills=95, seed=0)
    assert any(plan.needs_server for plan in todo)
    for plan in todo:
        assert plan.needs_server == bool(SERVER_FAULTS.keys() & plan.faults)
        assert plan.needs_server == (SERVER_FAULTS.keys() >= set(plan.faults) and bool(plan.faults))
    without = plans(PairWorkload, DIALECTS, None, kills=95, seed=0, restarts=False)
    assert not any(plan.needs_server for plan in without)
