"""What users may do on pages: the table of acts, and the forms for them.

The words of an act are those of its command, of its row in the audit, and of its path: ``/act/dags-pause``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import uuid4

import msgspec

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.scheduling.states import FAILED, TERMINAL
from headgate.store.access.audit import Action, Role
from headgate.store.inspect.letters import UNRESOLVED

RANKS: Final[dict[Role, int]] = {"nobody": 0, "viewer": 1, "operator": 2, "admin": 3}

# The least role that may do it. There is a page for nothing else: all others are commands alone.
ACTS: Final[dict[Action, Role]] = {
    "dags pause": "operator",
    "dags unpause": "operator",
    "dags trigger": "operator",
    "runs cancel": "operator",
    "runs end": "operator",
    "tasks clear": "operator",
    "tasks mark-success": "operator",
    "tasks mark-failed": "operator",
    "tasks start": "operator",
    "tasks restart": "operator",
    "tasks stop": "operator",
    "signals send": "operator",
    "triggers release": "operator",
    "streams drift": "operator",
    "dlq redrive": "operator",
    "dlq edit": "admin",
    "dlq discard": "admin",
    "watchers pause": "admin",
    "watchers resume": "admin",
    "watchers restart": "admin",
    "watchers remove": "admin",
    "pools set": "admin",
    "pools delete": "admin",
    "signals forget": "admin",
}


def act_path(action: Action) -> str:
    """Return the path that the forms of an act are sent to."""
    return f"/act/{action.replace(' ', '-')}"


class Field(msgspec.Struct, frozen=True):
    """A field of a form. With ``options`` it is a choice, (value, text); ``is_flag``: a box to tick.

    ``is_long``: it has several lines. ``has_none``: no option may be chosen, too, which a filter calls "any".
    """

    name: str
    label: str
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()
    placeholder: str = ""
    is_flag: bool = False
    is_long: bool = False
    has_none: bool = True


class Act(msgspec.Struct, frozen=True):
    """A form for one act. ``about`` says which object it is for, and is sent as it stands."""

    action: Action
    label: str
    about: Mapping[str, str | int]
    fields: Sequence[Field] = ()

    @property
    def path(self) -> str:
        """The path that it is sent to."""
        return act_path(self.action)


def may(role: Role, least: Role) -> bool:
    """Whether a role may do what needs at least another."""
    return RANKS[role] >= RANKS[least]


# --- the acts on one thing -----------------------------------------------------------------------

NOTE = Field("note", "Note")


def of_dag(dag: str, *, is_paused: bool, now: datetime) -> tuple[Act, ...]:
    """Return the acts on a DAG; a form that is sent twice starts one run, whose name has the time ``now``."""
    pause = Act("dags unpause", "Unpause", {"dag": dag}) if is_paused else Act("dags pause", "Pause", {"dag": dag})
    conf = Field("conf", "conf, as JSON", placeholder='{"n": 1}')
    run_id = Field("run_id", "Name of the run", placeholder="manual__ and the time")
    return (pause, Act("dags trigger", "Start a run", {"dag": dag, "at": now.isoformat()}, (conf, run_id)))


def of_run(dag: str, run_id: str, *, has_ended: bool) -> tuple[Act, ...]:
    """Return the acts on a run."""
    about = {"dag": dag, "run": run_id}
    clear = Act("tasks clear", "Clear the tasks that failed ...", {**about, "which": "failed"})
    whole = Act("tasks clear", "Clear all tasks ...", {**about, "which": "all"})
    if has_ended:
        return (clear, whole)
    return (clear, whole, Act("runs end", "Start nothing more in it", about), Act("runs cancel", "Cancel it", about))


def of_task(dag: str, run_id: str, task: str, *, state: TaskState, is_mapped: bool) -> tuple[Act, ...]:
    """Return the acts on a task, or on a mapped one with all its instances: these are not started one by one."""
    about = {"dag": dag, "run": run_id, "task": task}
    downstream = Field("downstream", "with all tasks downstream", is_flag=True)
    clear = Act("tasks clear", "Clear it ...", about, (downstream,))
    start = () if is_mapped else (Act("tasks start", "Start it now", about),)
    succeeded = Act("tasks mark-success", "Mark as succeeded", about)
    if state in TERMINAL:
        return (clear, *start, succeeded) if state in FAILED and not is_mapped else (clear, *start)
    moves = () if is_mapped else (Act("tasks restart", "Restart", about), Act("tasks stop", "Stop", about))
    return (clear, *start, *moves, succeeded, Act("tasks mark-failed", "Mark as failed", about))


def of_watcher(name: str, *, hold: str | None) -> tuple[Act, ...]:
    """Return the acts on a watcher."""
    about = {"watcher": name}
    remove = Act("watchers remove", "Remove it ...", about)
    if hold is not None:
        return (Act("watchers resume", "Resume", about), remove)
    return (Act("watchers pause", "Pause", about), Act("watchers restart", "Restart", about), remove)


def of_trigger(trigger_id: int, *, hold: str | None) -> tuple[Act, ...]:
    """Return the acts on a trigger, whoever's, if it is held. One that a user has paused is resumed by its watcher."""
    return () if hold in (None, "paused") else (Act("triggers release", "Release", {"trigger": trigger_id}),)


def of_stream(stream_id: int, *, has_drifted: bool) -> tuple[Act, ...]:
    """Return the acts on a stream."""
    ask = Act("streams drift", "Ask its broker", {"stream": stream_id})
    accept = Act("streams drift", "Accept what was found ...", {"stream": stream_id, "accepts": "yes"})
    return (ask, accept) if has_drifted else (ask,)


def of_letter(letter_id: int, state: str, payload: str | None, *, is_fit: bool) -> tuple[Act, ...]:
    """Return the acts on a dead letter in a state; ``payload`` is the text to begin an edit with, None: without one.

    ``is_fit``: a redrive may take it as it is, see `headgate.store.inspect.letters.why_unfit`.
    """
    redrive = Act("dlq redrive", "Redrive", {"letter": letter_id}, (NOTE,))
    discard = Act("dlq discard", "Discard", {"letter": letter_id}, (NOTE,))
    edit: tuple[Act, ...] = ()
    if payload is not None:
        new = Field("payload", "Payload, as JSON", payload, is_long=True)
        edit = (Act("dlq edit", "Edit what a redrive stores", {"letter": letter_id}, (new, NOTE)),)
    redrives = (redrive,) if is_fit else ()
    by_state = {"open": (*redrives, discard, *edit), "redriving": (redrive, discard), "at_broker": (discard,)}
    return by_state.get(state, ())


def of_letters(which: Mapping[str, str], state: str) -> tuple[Act, ...]:
    """Return the acts on all dead letters of a filter that are in a state, or unresolved."""
    about = {**which, "state": state}
    redrive = Act("dlq redrive", "Redrive all of these ...", about, (NOTE,))
    redrive_open = Act("dlq redrive", "Redrive the open ones of these ...", about, (NOTE,))
    discard = Act("dlq discard", "Discard all of these ...", about, (NOTE,))
    by_state = {"unresolved": (redrive_open, discard), "open": (redrive, discard)}
    return by_state.get(state, (discard,) if state in UNRESOLVED else ())


def of_pools() -> tuple[Act, ...]:
    """Return the acts on pools."""
    pool = Field("pool", "Pool")
    return (
        Act("pools set", "Set", {}, (pool, Field("slots", "Slots"))),
        Act("pools delete", "Delete ...", {}, (pool,)),
    )


def of_signals(key: str = "", namespace: str = DEFAULT_NAMESPACE, *, is_known: bool = False) -> tuple[Act, ...]:
    """Return the acts on a key of signals, which may be one that there is; a form that is sent twice sends once."""
    once = uuid4().hex
    value = Field("value", "Value, as JSON", placeholder="null")
    if not is_known:
        names = (Field("key", "Key"), Field("namespace", "Namespace", namespace))
        return (Act("signals send", "Send a signal", {"once": once}, (*names, value)),)
    about = {"key": key, "namespace": namespace, "is_known": "yes"}
    forget = Act("signals forget", "Forget it with all versions ...", about)
    return (Act("signals send", "Send the next version", {**about, "once": once}, (value,)), forget)
