"""Run one step: load the DAG file, find the task, and return the outcome."""

from __future__ import annotations

import linecache
import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Final

from headgate.child.error_text import describe_error
from headgate.child.queries import QueryHandler, of_kind
from headgate.protocol.messages.queries import EncodedValue, GetStartSignals, GetXCom, StartSignals, XComPage
from headgate.protocol.messages.steps import EXECUTION_TIMEOUT_OVER, StepFailed, StepNotBegun
from headgate.protocol.messages.worker import Step, StepEnded
from headgate.protocol.values import decode_value
from headgate.tasks.context import Context, RunAsset, TaskStream, XComReader, make_context
from headgate.tasks.execution import NO_EVENT, Resumption
from headgate.tasks.execution import run_step as execute
from headgate.tasks.operator import BaseOperator
from headgate.tasks.parsing import load_dags
from headgate.worker.stops import StepStopped

# A file that was changed so many seconds ago, or will be by a clock that differs, may not be parsed yet, or is not yet
# what its author means it to be: who has sent the step knows the tasks that stood in it before.
CHANGED_LATELY_S: Final = 60.0

Killing = Callable[[Callable[[], None]], AbstractContextManager[None]]


def run(step: Step, *, ask: QueryHandler, killing: Killing, on_loaded: Callable[[], None]) -> StepEnded:
    """Run a step and return how it has ended; any error is its outcome. Raises only `StepStopped`.

    ``on_loaded`` is called when the DAG file has been loaded. While the task's own code runs, its ``on_kill`` is passed
    to ``killing``.
    """
    try:
        operator = find_task(step.file, step.dag_id, step.task_id)
        if isinstance(operator, StepFailed | StepNotBegun):
            return StepEnded(step.token, operator)
        if step.ends_at_s is not None and time.monotonic() >= step.ends_at_s:
            return StepEnded(step.token, StepFailed(EXECUTION_TIMEOUT_OVER))  # while its file was loaded
        on_loaded()
        with killing(operator.on_kill):
            context = _context(operator, step, ask)
            outcome = execute(operator, context, _resumption(step), step.stream, emitted=step.emitted)
        return StepEnded(step.token, outcome, context["ti"].map_name)
    except StepStopped:
        raise
    except BaseException as error:
        # An interrupt raised by the author's code, or a context that cannot be created.
        text, trace = describe_error(error)
        return StepEnded(step.token, StepFailed(f"DAG {step.dag_id!r}, task {step.task_id!r}: {text}", trace))


def find_task(file: str, dag_id: str, task_id: str) -> BaseOperator | StepFailed | StepNotBegun:
    """Load a DAG file and return a task of it, or the end of a step that needs it. Raises only `StepStopped`."""
    try:
        dags = load_dags(file)
    except StepStopped:
        raise
    except BaseException as error:  # also SystemExit, which the author's file may raise
        if isinstance(error, FileNotFoundError) and error.filename == os.path.abspath(file):
            # It is being replaced, or its disk is not mounted: no fault of the task, and none of its tries is lost.
            return StepNotBegun(f"the DAG file {file} is not there")
        linecache.checkcache()
        text, trace = describe_error(error)
        problem = f"the DAG file {file} cannot be loaded: {text}"
        return _unready(problem, trace, file, *_files_of(error))
    dag = dags.get(dag_id)
    if dag is None:
        found = ", ".join(map(repr, dags)) or "none"
        return _unready(f"the DAG file {file}, as it is here, has no DAG {dag_id!r}; it has {found:.1000}", "", file)
    operator = dag.tasks.get(task_id)
    if operator is None:
        found = ", ".join(map(repr, dag.tasks)) or "none"
        problem = f"DAG {dag_id!r} of the file {file}, as it is here, has no task {task_id!r}; it has {found:.1000}"
        return _unready(problem, "", file)
    return operator


def _unready(problem: str, trace: str, *files: str) -> StepFailed | StepNotBegun:
    """Return the end of a step that its file cannot begin: if one of the files was just changed, no try is lost.

    It is being edited, or replaced together with others, and the supervisor reads it in a moment.
    """
    return StepNotBegun(problem) if any(map(_was_just_changed, files)) else StepFailed(problem, trace)


def _was_just_changed(file: str) -> bool:
    try:
        found = os.stat(file)
    except OSError:
        return True  # it is being replaced
    # The time of its content may be an old one, if it was copied with it.
    return abs(time.time() - max(found.st_mtime, found.st_ctime)) < CHANGED_LATELY_S


def _files_of(error: BaseException) -> set[str]:
    """Return the files that have to do with an error of loading: those of its traceback, and the one that it names."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, SyntaxError | ImportError):
        files.add(str(error.filename if isinstance(error, SyntaxError) else error.path))
    return {file for file in files if os.path.isfile(file)}


def _context(operator: BaseOperator, step: Step, ask: QueryHandler) -> Context:
    params: Any = None if step.params is None else decode_value(step.params)
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"the params of run {step.run_id!r} are a {type(params).__name__}, not a dict")
    interval = step.data_interval_s
    return make_context(
        operator,
        run_id=step.run_id,
        try_number=step.try_number,
        logical_date=None if step.logical_date_s is None else _moment(step.logical_date_s),
        data_interval=None if interval is None else (_moment(interval[0]), _moment(interval[1])),
        params=params,
        map_index=step.map_index,
        map_length=step.map_length,
        given_digest=step.given_digest,
        own=step.own,
        read_xcom=_xcom_reader(ask),
        read_xcoms=lambda query: of_kind(XComPage, query, ask(query)),
        assets=tuple(
            RunAsset(event.asset, decode_value(event.payload), _moment(event.stored_at_s))
            for event in step.asset_events
        ),
        stream=TaskStream.of(step.stream),
        signals=_start_signals(ask) if operator.signals() or step.is_of_signals else None,
        traceparent=step.traceparent,
    )


def _start_signals(ask: QueryHandler) -> StartSignals:
    query = GetStartSignals()
    return of_kind(StartSignals, query, ask(query))


def _xcom_reader(ask: QueryHandler) -> XComReader:
    def read_xcom(task_id: str, key: str, map_index: int = -1) -> bytes | None:
        query = GetXCom(task_id, key, map_index)
        return of_kind(EncodedValue, query, ask(query)).value

    return read_xcom


def _resumption(step: Step) -> Resumption | None:
    if step.next_method is None:
        return None
    return Resumption(step.next_method, step.next_kwargs or b"{}", NO_EVENT if step.event is None else step.event)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
