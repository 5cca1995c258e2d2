"""A parsed DAG on the wire: one frozen struct per part, the limits, and the check that both sides make.

A worker process parses a DAG file by running its author's code, and reports each DAG as a `DagSpec`. The supervisor
never imports that code: it schedules from the spec alone, and only after `check_dag` has accepted it.

Structs travel as msgpack arrays, as in `headgate.protocol.messages.runner`: a new field goes to the end of its struct
and has a default. Durations are in seconds; points in time are seconds since the epoch.
"""

from __future__ import annotations

import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from headgate.protocol.errors import DagMalformed, DagTooLong, RemoteProtocolError
from headgate.protocol.messages import MALFORMED, WireStruct, maps
from headgate.protocol.messages.maps import MapSpec, map_problem
from headgate.protocol.messages.queries import TaskState as TaskState  # to be imported from here as well
from headgate.protocol.messages.rules import (
    STARTING,
    Rules,
    SignalRule,
    TaskRule,
    end_rules_problem,
    predicate_problem,
    rules_problem,
)
from headgate.protocol.messages.runner import EVENT_BYTES_MAX, KWARGS_BYTES_MAX
from headgate.protocol.messages.schedules import ASSET_CHARS_MAX as ASSET_CHARS_MAX
from headgate.protocol.messages.schedules import ASSETS_MAX as ASSETS_MAX
from headgate.protocol.messages.schedules import DURATION_S_MAX as DURATION_S_MAX
from headgate.protocol.messages.schedules import EVENTS_PER_RUN_MAX as EVENTS_PER_RUN_MAX
from headgate.protocol.messages.schedules import NAME_CHARS_MAX as NAME_CHARS_MAX
from headgate.protocol.messages.schedules import AssetSchedule as AssetSchedule
from headgate.protocol.messages.schedules import CronSchedule as CronSchedule
from headgate.protocol.messages.schedules import Schedule, schedule_problem
from headgate.protocol.messages.schedules import SignalSchedule as SignalSchedule
from headgate.protocol.messages.schedules import asset_problem as asset_problem
from headgate.protocol.messages.schedules import name_problem as name_problem
from headgate.protocol.messages.signals import wait_problem
from headgate.protocol.messages.start_triggers import OF_MAPPED, own_problem
from headgate.protocol.messages.start_triggers import StartTrigger as StartTrigger  # to be imported from here as well
from headgate.protocol.messages.task_streams import stream_problem

# The limits of a DAG (I11). A DAG that exceeds one is refused when its file is parsed, where its author sees the error.
TASKS_PER_DAG_MAX = 10_000  # the scheduler evaluates all tasks of a run at once
UPSTREAM_PER_TASK_MAX = 1000  # the trigger rule of a task is evaluated over all of them whenever one of them ends
DAG_SPEC_BYTES_MAX = 4 * 1024 * 1024  # one encoded spec: several still fit a frame
ID_CHARS_MAX = 250  # dag_id, task_id: 1,000 bytes of UTF-8 at most, so that both together fit an index row
TEXT_CHARS_MAX = 64 * 1024  # a description
TAGS_MAX = 100
CLASSPATH_CHARS_MAX = 1000
RETRIES_MAX = 10_000  # a task that needs more should loop
# Points in time: the years 2 to 9998. Outside of them a conversion to a time zone may leave the range of datetime.
MOMENT_S_MIN = -62_104_060_800.0
MOMENT_S_MAX = 253_370_764_799.0
PRIORITY_MAX = 1_000_000_000  # either sign; sums of them stay within 64 bits
POOL_SLOTS_MAX = 1_000_000
ACTIVE_RUNS_MAX = 100_000
XCOM_BYTES_MAX = 48 * 1024  # one encoded XCom; larger values belong in a file or an object store
XCOMS_PER_STEP_MAX = 100  # pushed by one step of a task
XCOM_KEY_CHARS_MAX = 250

DEFAULT_QUEUE: Final = "default"
DEFAULT_POOL: Final = "default_pool"
DEFAULT_MAX_ACTIVE_RUNS: Final = 16

TriggerRule: TypeAlias = Literal[
    "all_success",
    "all_failed",
    "all_done",
    "all_skipped",
    "one_success",
    "one_failed",
    "one_done",
    "none_failed",
    "none_failed_min_one_success",
    "none_skipped",
    "always",
]
TRIGGER_RULES: Final[tuple[TriggerRule, ...]] = typing.get_args(TriggerRule)


# --- the structs ---------------------------------------------------------------------------------


class TaskSpec(WireStruct, frozen=True):
    """One task of a DAG; part of `DagSpec`.

    ``upstream`` are sorted task ids. ``execution_timeout_s`` limits the whole try, deferrals included. None means no
    limit, for ``max_retry_delay_s`` as well. A mapped task has ``map``; ``active_max`` is how many of its instances may
    be with workers at once, in one run. A task that ``emits`` leaves elements while it runs. All tasks of the mapped
    ``group`` have the same map, and one instance at each index, which waits for those at the same index. ``signals``
    are rules by which signals start, restart and stop the task. An ``endless`` one does not end by itself: it gets a
    worker beside the pool, and is moved to another one when that is lost.
    """

    task_id: str
    operator: str  # the name to show: that of the class, or of the decorator
    upstream: tuple[str, ...] = ()
    trigger_rule: TriggerRule = "all_success"
    retries: int = 0
    retry_delay_s: float = 300.0
    retry_exponential_backoff: bool = False
    max_retry_delay_s: float | None = None
    execution_timeout_s: float | None = None
    priority_weight: int = 1
    queue: str = DEFAULT_QUEUE
    pool: str = DEFAULT_POOL
    pool_slots: int = 1
    start_trigger: StartTrigger | None = None
    map: MapSpec | None = None
    active_max: int | None = None
    emits: bool = False
    group: str = ""
    signals: Rules | None = None
    endless: bool = False


class DagSpec(WireStruct, frozen=True):
    """One DAG, as a worker process reports it. If ``schedule`` is None, it runs only on request.

    No run's interval begins before ``start_date_s``, in seconds since the epoch. A signal that meets one of ``end_on``
    ends the run in which it counts.
    """

    dag_id: str
    schedule: Schedule | None = None
    start_date_s: float | None = None
    catchup: bool = False
    max_active_runs: int = DEFAULT_MAX_ACTIVE_RUNS
    tasks: tuple[TaskSpec, ...] = ()
    is_paused_upon_creation: bool = False
    description: str = ""
    tags: tuple[str, ...] = ()
    end_on: tuple[SignalRule, ...] = ()


# --- bytes ---------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[DagSpec] = msgspec.msgpack.Decoder(DagSpec)


def encode_dag(spec: DagSpec) -> bytes:
    """Return the spec as bytes; equal specs give equal bytes, so that a change of a file can be seen.

    Raises `DagTooLong` beyond ``DAG_SPEC_BYTES_MAX``, and `DagMalformed` for text that has no form on the wire.
    """
    try:
        data = _ENCODER.encode(spec)
    except (TypeError, ValueError, OverflowError) as error:
        raise DagMalformed(spec.dag_id, None, f"cannot be encoded: {error}") from error
    if len(data) > DAG_SPEC_BYTES_MAX:
        raise DagTooLong(spec.dag_id, len(data), DAG_SPEC_BYTES_MAX)
    return data


def decode_dag(data: bytes) -> DagSpec:
    """Return the spec in ``data``, checked by `check_dag`.

    Raises `RemoteProtocolError` if the bytes are not a spec, `DagTooLong` or `DagMalformed` if the spec breaks a rule.
    """
    if len(data) > DAG_SPEC_BYTES_MAX:
        raise DagTooLong("?", len(data), DAG_SPEC_BYTES_MAX)
    try:
        spec = _DECODER.decode(data)
    except MALFORMED as error:
        raise RemoteProtocolError(f"these {len(data):,} bytes are not a DAG: {error}") from error
    check_dag(spec)
    return spec


# --- the check -----------------------------------------------------------------------------------


def check_dag(spec: DagSpec) -> None:
    """Raise `DagMalformed` if the spec exceeds a limit, has a malformed id, or has a cycle.

    Cron expressions and time zones are checked elsewhere, because that needs a library and the machine's tz database.
    """
    dag_id = spec.dag_id

    def need(holds: bool, task_id: str | None, problem: str) -> None:
        if not holds:
            raise DagMalformed(dag_id, task_id, problem)

    need((problem := id_problem(dag_id)) is None, None, f"the dag_id {problem}")
    need(
        1 <= spec.max_active_runs <= ACTIVE_RUNS_MAX,
        None,
        f"max_active_runs must be in 1..{ACTIVE_RUNS_MAX}, not {spec.max_active_runs}",
    )
    need(len(spec.tasks) <= TASKS_PER_DAG_MAX, None, f"has {len(spec.tasks)} tasks; the limit is {TASKS_PER_DAG_MAX}")
    need(len(spec.description) <= TEXT_CHARS_MAX, None, f"the description is longer than {TEXT_CHARS_MAX} characters")
    need("\0" not in spec.description, None, "the description holds a NUL, which no database takes as text")
    need(len(spec.tags) <= TAGS_MAX, None, f"has {len(spec.tags)} tags; the limit is {TAGS_MAX}")
    for tag in spec.tags:
        need((problem := name_problem(tag)) is None, None, f"a tag {problem}")
    need(
        spec.start_date_s is None or MOMENT_S_MIN <= spec.start_date_s <= MOMENT_S_MAX,
        None,
        f"start_date must be a moment in the years 2 to 9998, not {spec.start_date_s}",
    )
    for problem in (
        None if spec.schedule is None else schedule_problem(spec.schedule),
        end_rules_problem(spec.end_on),
    ):
        need(problem is None, None, str(problem))
    known: set[str] = set()
    for task in spec.tasks:
        need(task.task_id not in known, task.task_id, "is in the DAG twice")
        known.add(task.task_id)
        problem = task_problem(task)
        need(problem is None, task.task_id, str(problem))
    emitting = {task.task_id for task in spec.tasks if task.emits}
    mapped = {task.task_id for task in spec.tasks if task.map is not None}
    for task in spec.tasks:
        for upstream in task.upstream:
            need(upstream in known, task.task_id, f"its upstream {upstream!r} is not a task of this DAG")
        for source in () if task.map is None else maps.of_tasks(task.map.source):
            holds = isinstance(source, maps.Output) or source.task_id in emitting
            need(holds, task.task_id, f"is expanded over the elements of {source.task_id!r}, which emits none")
            holds = task.start_trigger is None or task.start_trigger.own is None or source.task_id not in mapped
            need(
                holds, task.task_id, f"cannot begin in its trigger: it is expanded over {source.task_id!r}, {OF_MAPPED}"
            )
    cycle = find_cycle({task.task_id: task.upstream for task in spec.tasks})
    need(cycle is None, cycle[0] if cycle else None, f"is upstream of itself: {' >> '.join(cycle or ())}")
    _check_groups(spec)
    _check_rules(spec)


def id_problem(name: str) -> str | None:
    """Return the problem with a dag_id or task_id, or None. Letters, digits, ``_``, ``-`` and ``.`` are allowed."""
    if not name:
        return "is empty"
    if name in (".", ".."):
        return f"{name!a} has another meaning in the address of a page"
    if len(name) > ID_CHARS_MAX:
        return f"{name[:60]!a}... has {len(name)} characters; the limit is {ID_CHARS_MAX}"
    if not all(character.isalnum() or character in "_-." for character in name):
        return f"{name!a} may have letters, digits, '_', '-' and '.' only"
    return None


def _check_groups(spec: DagSpec) -> None:
    """Raise `DagMalformed` for a mapped group that cannot be expanded as one."""
    groups: dict[str, list[TaskSpec]] = {}
    for task in spec.tasks:
        if task.group:
            groups.setdefault(task.group, []).append(task)
    for name, tasks in groups.items():
        if (problem := _group_problem(name, tasks)) is not None:
            raise DagMalformed(spec.dag_id, tasks[0].task_id, f"the mapped group {name!r:.100} {problem}")
    if not groups:
        return
    part_of = _parts_of_graph(spec.tasks)
    above: dict[tuple[str, str], list[tuple[str, str]]] = {part: [] for part in part_of.values()}
    for task in spec.tasks:
        part = part_of[task.task_id]
        above[part] += [part_of[one] for one in task.upstream if part_of[one] != part]
    if (cycle := find_cycle(above)) is not None:
        at = next(index for index, (group, _) in enumerate(cycle) if group)
        path = [group or name for group, name in (*cycle[at:-1], *cycle[:at], cycle[at])]
        raise DagMalformed(
            spec.dag_id,
            groups[path[0]][0].task_id,
            f"is in a mapped group that others leave and come back to, {' >> '.join(path)}: they would wait for all of "
            f"its indexes, and each index for them",
        )


def _check_rules(spec: DagSpec) -> None:
    """Raise `DagMalformed` for a rule about a task that is not in the DAG, and for tasks that start each other."""
    known = {task.task_id for task in spec.tasks}
    starting: dict[str, list[str]] = {}
    for task in spec.tasks:
        for rule in () if task.signals is None else task.signals.rules:
            if not isinstance(rule, TaskRule):
                continue
            if rule.task_id not in known:
                problem = f"has a rule about the end of {rule.task_id!r:.100}, which is not a task of this DAG"
                raise DagMalformed(spec.dag_id, task.task_id, problem)
            if rule.action in STARTING:
                starting.setdefault(task.task_id, []).append(rule.task_id)
    if (cycle := find_cycle(starting)) is not None:
        problem = f"starts by its own end, {' >> '.join(cycle)}: the run would never end"
        raise DagMalformed(spec.dag_id, cycle[0], problem)


def _parts_of_graph(tasks: Iterable[TaskSpec]) -> dict[str, tuple[str, str]]:
    """Return, by task id, the part of the graph that each task is in: its mapped group, or the task by itself."""
    return {task.task_id: (task.group, "" if task.group else task.task_id) for task in tasks}


def _group_problem(name: str, tasks: Sequence[TaskSpec]) -> str | None:
    """Return the problem with a mapped group of these tasks; None if there is none."""
    if (problem := id_problem(name)) is not None:
        return problem
    if len(tasks) > maps.GROUP_TASKS_MAX:
        return f"has {len(tasks)} tasks; the limit is {maps.GROUP_TASKS_MAX}"
    spec = tasks[0].map
    if spec is None or any(task.map != spec for task in tasks):
        return "has tasks that are not mapped as the others are"
    ids = {task.task_id for task in tasks}
    upstream = {above for task in tasks for above in task.upstream}
    for source in maps.of_tasks(spec.source):
        if source.task_id in ids:
            return f"is expanded over the output of {source.task_id!r}, which is one of its tasks"
    if isinstance(spec.source, maps.Worklist) and spec.source.task_id not in ids:
        return f"is expanded over what is appended to {spec.source.task_id!r:.100}, which is none of its tasks"
    return map_problem(spec, upstream)


_Node = TypeVar("_Node", bound=Hashable)


def find_cycle(upstream: Mapping[_Node, Sequence[_Node]]) -> list[_Node] | None:
    """Return the nodes of one cycle in the order of execution, with the first one repeated at the end, or None."""
    done: set[_Node] = set()
    for root in upstream:
        if root in done:
            continue
        # Depth first, but not recursive: a chain may be as long as TASKS_PER_DAG_MAX.
        path = [root]
        on_path = {root}
        pending = [iter(upstream[root])]
        while path:
            for above in pending[-1]:
                if above in on_path:
                    # The path leads upstream; reversed, it reads like the author's a >> b.
                    return [*reversed([*path[path.index(above) :], above])]
                if above not in done and above in upstream:
                    path.append(above)
                    on_path.add(above)
                    pending.append(iter(upstream[above]))
                    break
            else:
                done.add(path[-1])
                on_path.discard(path.pop())
                pending.pop()
    return None


def task_problem(task: TaskSpec) -> str | None:
    """Return the problem with one task by itself, or None."""
    if (problem := id_problem(task.task_id)) is not None:
        return f"the task_id {problem}"
    if len(task.upstream) > UPSTREAM_PER_TASK_MAX:
        return f"has {len(task.upstream)} upstream tasks; the limit is {UPSTREAM_PER_TASK_MAX}"
    if len(set(task.upstream)) != len(task.upstream):
        return "names an upstream task twice"
    for name, number, least, most in (
        ("retries", task.retries, 0, RETRIES_MAX),
        ("priority_weight", task.priority_weight, -PRIORITY_MAX, PRIORITY_MAX),
        ("pool_slots", task.pool_slots, 1, POOL_SLOTS_MAX),
    ):
        if not least <= number <= most:
            return f"{name} must be in {least}..{most}, not {number}"
    for name, text in (("operator's name", task.operator), ("queue", task.queue), ("pool", task.pool)):
        if (problem := name_problem(text)) is not None:
            return f"the {name} {problem}"
    if not 0 <= task.retry_delay_s <= DURATION_S_MAX:
        return f"retry_delay must be in 0..{DURATION_S_MAX:.0f} s, not {task.retry_delay_s}"
    for name, seconds in (
        ("max_retry_delay", task.max_retry_delay_s),
        ("execution_timeout", task.execution_timeout_s),
        ("the start trigger's timeout", None if task.start_trigger is None else task.start_trigger.timeout_s),
    ):
        if (problem := duration_problem(seconds)) is not None:
            return f"{name} {problem}"
    if task.active_max is not None and not 1 <= task.active_max <= POOL_SLOTS_MAX:
        return f"max_active_tis_per_dagrun must be in 1..{POOL_SLOTS_MAX}, not {task.active_max}"
    if task.map is not None and task.emits:
        return "is mapped, and cannot emit elements: what its instances return is there for others"
    if task.map is not None and not task.group:
        if (problem := map_problem(task.map, task.upstream)) is not None:
            return problem
        if isinstance(task.map.source, maps.Worklist) and task.map.source.task_id != task.task_id:
            return f"is expanded over what is appended to {task.map.source.task_id!r:.100}, which is another task"
    if task.signals is not None:
        if task.map is not None:
            return "is mapped, and cannot have rules about signals: they are for whole tasks"
        if (problem := rules_problem(task.signals)) is not None:
            return problem
    if task.endless and (problem := _endless_problem(task)) is not None:
        return problem
    if task.start_trigger is None:
        return None
    stream = task.start_trigger.stream
    if stream is not None and stream.elements is not None and not task.emits:
        return "does not emit elements, and those of its start trigger would be"
    if (problem := own_problem(task.start_trigger, task.map, task.group)) is not None:
        return f"cannot begin in its trigger: {problem}"
    return _start_problem(task.start_trigger)


def _endless_problem(task: TaskSpec) -> str | None:
    if task.map is not None:
        return "is mapped, and cannot be endless: what ends such a task is for whole tasks"
    if task.execution_timeout_s is not None:
        return "is endless, and cannot have an execution_timeout: a signal ends it, or `headgate tasks stop`"
    if task.start_trigger is not None and task.start_trigger.signal is not None:
        return "waits for a signal without a worker, and cannot be endless"
    return None


def duration_problem(seconds: float | None) -> str | None:
    """Return the problem with a timeout or the limit of a delay, or None."""
    if seconds is None or 0 < seconds <= DURATION_S_MAX:
        return None
    return f"must be more than 0 and at most {DURATION_S_MAX:.0f} s, not {seconds}"


def _start_problem(start: StartTrigger) -> str | None:
    if not 0 < len(start.classpath) <= CLASSPATH_CHARS_MAX or not start.classpath.isprintable():
        return f"the start trigger's classpath must have 1..{CLASSPATH_CHARS_MAX} printable characters"
    if not start.next_method.isidentifier() or len(start.next_method) > ID_CHARS_MAX:
        return f"the start trigger's next_method {start.next_method[:60]!a} is not the name of a method"
    if len(start.kwargs) > KWARGS_BYTES_MAX:
        return f"the start trigger's kwargs need {len(start.kwargs):,} bytes; the limit is {KWARGS_BYTES_MAX:,}"
    if len(start.next_kwargs) > EVENT_BYTES_MAX:
        return f"the start trigger's next_kwargs need {len(start.next_kwargs):,} bytes, not {EVENT_BYTES_MAX:,} at most"
    if start.stream is not None and (problem := stream_problem(start.stream)) is not None:
        return f"the stream of the start trigger: {problem}"
    if start.signal is not None:
        if start.stream is not None:
            return "a wait for a signal has no stream"
        if start.signal.predicate is not None and (problem := predicate_problem(start.signal.predicate)) is not None:
            return f"the wait for the signal {start.signal.key!a:.60}: {problem}"
        return wait_problem(start.signal)
    return None
