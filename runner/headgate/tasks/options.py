"""Options that every task takes, whatever its operator, and their check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypedDict, get_args

from headgate.protocol.messages.dags import DEFAULT_POOL, DEFAULT_QUEUE, TRIGGER_RULES, TriggerRule
from headgate.protocol.messages.rules import Overlap, StoppedAs
from headgate.signals.rules import On
from headgate.triggers import airflow_names
from headgate.triggers.base import StartTriggerArgs


class TaskOptions(TypedDict, total=False):
    """The options of a task; the DAG's ``default_args`` are their defaults.

    ``execution_timeout`` limits a whole try, deferrals included. A task with ``start_from_trigger`` starts in the
    trigger runner, without a worker, with the trigger that ``start_trigger_args`` names. Of a mapped task at most
    ``max_active_tis_per_dagrun`` instances are with workers at once, in one run. ``signals`` are rules by which signals
    start, restart and stop the task; ``overlap`` says what becomes of a start while it is under way, and ``stopped_as``
    in which state a stop leaves it (docs/signals.md). With ``every`` it starts with its run, and then again and
    again, or at the times of a cron expression.
    An ``endless`` task does not end by itself: it gets a worker of its own beside the pool, and ``stopped_as`` is
    ``success`` unless it says otherwise.
    """

    retries: int
    retry_delay: timedelta
    retry_exponential_backoff: bool
    max_retry_delay: timedelta | None
    execution_timeout: timedelta | None
    priority_weight: int
    queue: str
    pool: str
    pool_slots: int
    trigger_rule: TriggerRule
    max_active_tis_per_dagrun: int | None
    start_trigger_args: StartTriggerArgs | None
    start_from_trigger: bool
    signals: Sequence[On]
    every: timedelta | str | None
    overlap: Overlap
    stopped_as: StoppedAs
    endless: bool


DEFAULTS: Final = TaskOptions(
    retries=0,
    retry_delay=timedelta(minutes=5),
    retry_exponential_backoff=False,
    max_retry_delay=None,
    execution_timeout=None,
    priority_weight=1,
    queue=DEFAULT_QUEUE,
    pool=DEFAULT_POOL,
    pool_slots=1,
    trigger_rule="all_success",
    max_active_tis_per_dagrun=None,
    signals=(),
    every=None,
    overlap="latest",
    endless=False,
)
# An operator makes rules of these; all others are its attributes.
OF_RULES: Final = frozenset({"signals", "every"})
# The defaults of the first two are attributes of the operator's class, where its author may set them; that of the last
# depends on whether the task is endless.
NAMES: Final = frozenset({*DEFAULTS, "start_trigger_args", "start_from_trigger", "stopped_as"})

_NONE: Final = type(None)
_TYPES: Final[dict[str, tuple[type[Any], ...]]] = {
    "retries": (int,),
    "retry_delay": (timedelta,),
    "retry_exponential_backoff": (bool,),
    "max_retry_delay": (timedelta, _NONE),
    "execution_timeout": (timedelta, _NONE),
    "priority_weight": (int,),
    "queue": (str,),
    "pool": (str,),
    "pool_slots": (int,),
    "trigger_rule": (str,),
    "max_active_tis_per_dagrun": (int, _NONE),
    "start_trigger_args": (StartTriggerArgs, _NONE),
    "start_from_trigger": (bool,),
    "signals": (list, tuple),
    "every": (timedelta, str, _NONE),
    "overlap": (str,),
    "stopped_as": (str,),
    "endless": (bool,),
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "trigger_rule": TRIGGER_RULES,
    "overlap": get_args(Overlap),
    "stopped_as": get_args(StoppedAs),
}
assert _TYPES.keys() == NAMES


def options_problem(options: Mapping[str, Any]) -> str | None:
    """Return the problem with the name or type of an option, None if there is none. The protocol checks the limits."""
    for name, value in options.items():
        if name not in NAMES:
            return unknown_option(name, NAMES)
        if name == "signals" and isinstance(value, On):
            return "signals must be a list of rules: write [On(...)]"
        kinds = _TYPES[name]
        # A bool is an int to Python, and never meant as one here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)
            return f"{name} must be {wanted}, not {value!r:.100}"
        if name in _CHOICES and value not in _CHOICES[name]:
            return f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r:.100}"
    return None


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Return the sentence for an option that does not exist; for one of Airflow's, with what to use instead."""
    if (instead := airflow_names.OPTIONS.get(name)) is not None:
        return f"there is no option {name!r}: {instead}"
    return f"there is no option {name!r:.100}; there are {', '.join(sorted(known))}"
