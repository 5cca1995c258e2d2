"""Assembly of the part for tasks: a pool of workers, a parser of DAG files, the scheduler and their callbacks."""

from __future__ import annotations

import selectors
from collections.abc import Mapping
from typing import Any

import structlog

from headgate.protocol.messages.worker import Step, WorkerSettings
from headgate.store.ids import TryName
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseOutage, DatabaseRetry
from headgate.supervisor.children.isolation import RunAs
from headgate.supervisor.children.process import ChildProcess, start_worker
from headgate.supervisor.config import Settings
from headgate.supervisor.executors.file_parser import FileParser
from headgate.supervisor.executors.local import LocalExecutor
from headgate.supervisor.logs.process_log import relay
from headgate.supervisor.logs.task_logs import LEVELS_FOR_ALL, TaskLogs
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.tasks.core import TaskCore, TaskTimes
from headgate.supervisor.tasks.dag_files import DagFiles
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
) -> TaskCore:
    """Return the part for tasks; its workers' descriptors are on ``selector``. To be closed by the caller."""

    def retry_of(duty: str) -> DatabaseRetry:
        return DatabaseRetry(duty, settings.database_retry_wait_s, settings.database_retry_wait_max_s, outage)

    def spawn() -> ChildProcess:
        return start_worker(environment=environment, hide=answers.secrets.hide_in_bytes, run_as=run_as)

    def on_record(step: Step | None, record: dict[str, Any]) -> None:
        if step is not None:
            task_logs.write(name_of(step), record)
        if step is None or record.get("level") in LEVELS_FOR_ALL:
            relay(record)

    def on_output(step: Step | None, line: str) -> None:
        if step is not None:
            task_logs.output(name_of(step), line)
        else:
            log.warning("output of a worker", line=line)

    def on_file_output(file: str | None, line: str) -> None:
        log.info("output of a DAG file", line=line, file=file)

    of_workers = WorkerSettings(
        frame_bytes_max=settings.frame_bytes_max,
        import_paths=settings.import_paths,
        hook_timeout_s=settings.hook_timeout_s,
    )
    executor = LocalExecutor(
        selector,
        spawn,
        workers=settings.workers,
        settings=of_workers,
        on_record=on_record,
        on_output=on_output,
        on_begun=lambda step: task_logs.begun(name_of(step), step.next_method),
        memory_max_bytes=None if settings.worker_memory_max_mib is None else settings.worker_memory_max_mib * 1024**2,
        load_timeout_s=settings.dag_parse_timeout_s,
        end_grace_s=settings.worker_grace_s,
    )
    parser = FileParser(
        selector,
        spawn,
        timeout_s=settings.dag_parse_timeout_s,
        settings=of_workers,
        on_record=lambda file, record: relay({"dag_file": file, **record}),
        on_output=on_file_output,
    )
    return TaskCore(
        store.tasks,
        executor,
        Scheduler(store, retry=retry_of("scheduling")),
        answers,
        DagFiles(settings.dags_folder, parser, store.tasks, look_s=settings.dags_look_s),
        task_logs,
        queues=settings.queues,
        times=TaskTimes(look_s=settings.poll_interval_s),
        retry=retry_of("tasks"),
    )


def name_of(step: Step) -> TryName:
    """Return the name of the try that a step belongs to."""
    return TryName(step.dag_id, step.run_id, step.task_id, step.try_number, step.map_index)
