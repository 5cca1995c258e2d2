"""Assembly of the part for tasks: a pool of workers, a parser of DAG files, the scheduler and their callbacks."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from headgate.protocol.messages.worker import DecideSignals, Step, WorkerSettings
from headgate.store.ids import TryName
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseOutage, DatabaseRetry
from headgate.supervisor.children.isolation import RunAs
from headgate.supervisor.children.process import ChildProcess, start_worker
from headgate.supervisor.children.worker import SpawnWorker
from headgate.supervisor.config import Settings
from headgate.supervisor.executors.beside import TwoPools
from headgate.supervisor.executors.deciders import DECISION_S_MAX, Decider, Deciders
from headgate.supervisor.executors.file_parser import FileParser
from headgate.supervisor.executors.local import LocalExecutor
from headgate.supervisor.logs.process_log import relay
from headgate.supervisor.logs.task_logs import LEVELS_FOR_ALL, TaskLogs
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.tasks.core import TaskCore, TaskTimes
from headgate.supervisor.tasks.dag_files import DagFiles
from headgate.supervisor.tasks.decisions import Decisions
from headgate.supervisor.tasks.scheduler import Scheduler

log = structlog.get_logger(__name__)


def task_part(
    settings: Settings,
    selector: selectors.BaseSelector,
    store: Store,
    *,
    answers: StoreQueries,
    task_logs: TaskLogs,
    environment: Mapping[str, str],
    run_as: RunAs | None,
    outage: DatabaseOutage,
    figures: Figures,
) -> TaskCore:
    """Return the part for tasks; its workers' descriptors are on ``selector``. To be closed by the caller."""

    def retry_of(duty: str) -> DatabaseRetry:
        return DatabaseRetry(duty, settings.database_retry_wait_s, settings.database_retry_wait_max_s, outage)

    def spawn() -> ChildProcess:
        return start_worker(environment=environment, hide=answers.secrets.hide_in_bytes, run_as=run_as)

    def on_record(step: Step | DecideSignals | None, record: dict[str, Any]) -> None:
        if step is not None:
            task_logs.write(name_of(step), record)
        if step is None or record.get("level") in LEVELS_FOR_ALL:
            relay(record)

    def on_output(step: Step | DecideSignals | None, line: str) -> None:
        if step is not None:
            task_logs.output(name_of(step), line)
        else:
            log.warning("output of a worker", line=line)

    def on_begun(step: Step) -> None:
        task_logs.begun(name_of(step), step.next_method)

    of_workers = _of_workers(settings)
    deciders = _deciders(selector, spawn, of_workers, _memory_max_bytes(settings), on_record, on_output)
    pool_of = partial(
        LocalExecutor,
        selector,
        spawn,
        settings=of_workers,
        on_record=on_record,
        on_output=on_output,
        on_begun=on_begun,
        **_limits(settings),
    )
    return TaskCore(
        store.tasks,
        TwoPools(
            pool_of(workers=settings.workers),
            pool_of(workers=settings.endless_workers_max, steps_max=1, is_warm=False),
        ),
        Scheduler(store, retry=retry_of("scheduling"), healthy_s=settings.respawn_healthy_s),
        answers,
        DagFiles(
            settings.dags_folder,
            _parser(settings, selector, spawn, of_workers),
            store.tasks,
            look_s=settings.dags_look_s,
        ),
        Decisions(store.scheduling, deciders, task_logs),
        task_logs,
        queues=settings.queues,
        times=TaskTimes(look_s=settings.poll_interval_s, healthy_s=settings.respawn_healthy_s),
        retry=retry_of("tasks"),
        figures=figures,
    )


def _of_workers(settings: Settings) -> WorkerSettings:
    return WorkerSettings(
        frame_bytes_max=settings.frame_bytes_max,
        import_paths=settings.import_paths,
        hook_timeout_s=settings.hook_timeout_s,
    )


def _limits(settings: Settings) -> dict[str, Any]:
    return {
        "memory_max_bytes": _memory_max_bytes(settings),
        "load_timeout_s": settings.dag_parse_timeout_s,
        "end_grace_s": settings.worker_grace_s,
    }


def _memory_max_bytes(settings: Settings) -> int | None:
    mib = settings.worker_memory_max_mib
    return None if mib is None else mib * 1024**2


def _parser(
    settings: Settings, selector: selectors.BaseSelector, spawn: SpawnWorker, of_workers: WorkerSettings
) -> FileParser:
    return FileParser(
        selector,
        spawn,
        timeout_s=settings.dag_parse_timeout_s,
        memory_max_bytes=_memory_max_bytes(settings),
        settings=of_workers,
        on_record=lambda file, record: relay({"dag_file": file, **record}),
        on_output=lambda file, line: log.info("output of a DAG file", line=line, file=file),
    )


def _deciders(
    selector: selectors.BaseSelector,
    spawn: SpawnWorker,
    settings: WorkerSettings,
    memory_max_bytes: int | None,
    on_record: Callable[[DecideSignals | None, dict[str, Any]], object],
    on_output: Callable[[DecideSignals | None, str], object],
) -> Deciders:
    def make() -> Decider:
        return Decider(
            selector,
            spawn,
            timeout_s=DECISION_S_MAX,
            settings=settings,
            memory_max_bytes=memory_max_bytes,
            on_record=on_record,
            on_output=on_output,
        )

    return Deciders(make)


def name_of(step: Step | DecideSignals) -> TryName:
    """Return the name of the try that a step belongs to, or a decision."""
    map_index = step.map_index if isinstance(step, Step) else -1
    return TryName(step.dag_id, step.run_id, step.task_id, step.try_number, map_index)
