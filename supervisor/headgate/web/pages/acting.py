"""What the forms of pages do: one verb of the store each, then back to the page; many letters in parts.

Whatever may do much is asked for twice: the first answer says what it would do, and has the form that does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal
from uuid import uuid4

from starlette.responses import RedirectResponse

from headgate.presentation.drift import finding_text
from headgate.presentation.run_ids import run_id as checked_run_id
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.runner import EVENT_BYTES_MAX, KWARGS_BYTES_MAX
from headgate.protocol.messages.signals import AUTOMATIC, DEFAULT_NAMESPACE, SIGNAL_BYTES_MAX, SignalSend
from headgate.protocol.values import decode_value, encode_value
from headgate.scheduling.drift import worst_first
from headgate.scheduling.words import counted
from headgate.store.access.acts import Tried
from headgate.store.access.audit import Action, Written
from headgate.store.errors import LetterResolved, StoreError
from headgate.store.facts.drift import StreamDrift
from headgate.store.ids import LetterState
from headgate.store.inspect.letters import UNRESOLVED, LetterCount, LetterFilter
from headgate.store.inspect.runs import RunLine, TaskLine
from headgate.store.letters import LETTERS
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tasks.user_actions import Cleared, Mark
from headgate.web.acts import ACTS
from headgate.web.cells import path
from headgate.web.views import Answer, BadRequest, Handler, Page, View

CLEAR_S_MAX = 10.0  # of one request; what is left is said, and the same form goes on
LETTERS_S_MAX = 2.0  # of one part
ONE_ROW_S_MAX = 3600.0  # of the audit has all parts of an act; what goes on for longer has further rows
FAILURES_MAX = 10  # in a row: whatever is wrong is wrong for the others, too
BUSY_PAUSE_S = 0.05
FINDINGS_TOLD_MAX = 20


def done(view: View, *parts: str | int, **query: str | int | None) -> Answer:
    """Return to a page, which says what was done."""
    return RedirectResponse(path(*parts, **query, act=view.store.database.last_act), status_code=303)


def _ended(line: RunLine | TaskLine) -> StoreError:
    """Return the refusal of an act on what has ended: the page that had the button was older."""
    what = f"{line.name} of run {line.run_id}" if isinstance(line, TaskLine) else f"the run {line.run_id}"
    return StoreError(f"{what} of {line.dag} has ended already: {line.state}")


def _encoded(text: str, name: str, bytes_max: int, *, is_object: bool = False) -> bytes:
    """Return a value that was written as JSON, as it is stored. Raises `BadRequest`."""
    try:
        value = decode_value(text.encode())
        if is_object and not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        return encode_value(value, where=name, bytes_max=bytes_max)
    except (ValueError, ProtocolError) as error:
        raise BadRequest(f"{name}: {error}") from None


# --- DAGs, runs and tasks ------------------------------------------------------------------------


def pause_dag(view: View) -> Answer:
    """Pause a DAG."""
    return _set_paused(view, is_paused=True)


def unpause_dag(view: View) -> Answer:
    """Have a DAG go on."""
    return _set_paused(view, is_paused=False)


def _set_paused(view: View, *, is_paused: bool) -> Answer:
    dag = view.given("dag")
    view.store.tasks.set_paused(dag, is_paused=is_paused)
    return done(view, "dags", dag)


def trigger_dag(view: View) -> Answer:
    """Start a run of a DAG, with what its form says as conf."""
    dag, conf, run_id, at = view.given("dag"), view.field("conf"), view.field("run_id"), view.field("at")
    encoded = None if conf is None else _encoded(conf, "conf", KWARGS_BYTES_MAX, is_object=True)
    try:
        name = checked_run_id(run_id or f"manual__{at or view.store.inspect.now().isoformat()}")
    except ValueError as error:
        raise BadRequest(f"the name of the run: {error}") from None
    if view.store.tasks.create_run(dag, name, conf=encoded) is None:
        again = "" if run_id else ": this form has started it; load the page again to start another one"
        raise StoreError(f"the DAG {dag} has a run named {name!r} already{again}")
    return done(view, "dags", dag, "runs", name)


def cancel_run(view: View) -> Answer:
    """End a run and its unfinished tasks as failed."""
    line = view.store.inspect.run(view.given("dag"), view.given("run")).line
    if line.ended_at is not None:
        raise _ended(line)
    _repeat(lambda: view.store.tasks.cancel_run(line.id).is_ended)
    return done(view, "dags", line.dag, "runs", line.run_id)


def end_run(view: View) -> Answer:
    """Have signals start nothing more in a run."""
    line = view.store.inspect.run(view.given("dag"), view.given("run")).line
    if not view.store.signals.end_run(line.id):
        raise _ended(line)
    return done(view, "dags", line.dag, "runs", line.run_id)


def clear(view: View) -> Answer:
    """Clear tasks of a run; without a confirmation say which these would be."""
    store, dag, task = view.store, view.given("dag"), view.field("task")
    line = store.inspect.run(dag, view.given("run")).line
    which = view.field("which")
    if (task is None) == (which is None) or which not in (None, "failed", "all"):
        raise BadRequest("say which: a task, or all, or those that failed")
    names = [] if task is None else [store.inspect.find_task(dag, line.run_id, task).name.removesuffix("[]")]
    clear_some = partial(
        store.tasks.clear_many,
        line.id,
        names,
        downstream=view.field("downstream") is not None,
        only_failed=which == "failed",
    )
    if not view.is_confirmed:
        try:
            clear_some(is_tried_only=True)
        except Tried as tried:
            told = _told(tried.done)
            return view.confirm("tasks clear", f"Clear tasks of {dag} {line.run_id}?", told, "Clear them")
    cleared = clear_some()

    def go_on() -> bool:
        nonlocal cleared
        if cleared.left is not None:
            cleared = store.tasks.clear_on(cleared.left)
        return cleared.left is None

    _repeat(go_on)
    return done(view, "dags", dag, "runs", line.run_id)


def _told(cleared: Cleared) -> list[str]:
    lines = [f"{name} begins again" for name in sorted(cleared.cleared)]
    lines += [
        f"{name}, {counted(count, 'instance')}, begins again" for name, count in sorted(cleared.instances.items())
    ]
    if cleared.left is not None:
        lines.append("and more, in further transactions")
    lines += [f"{name} is being cleared already" for name in cleared.as_before]
    return lines or ["There is nothing to clear."]


def mark_success(view: View) -> Answer:
    """End a task as succeeded."""
    return _mark(view, "success")


def mark_failed(view: View) -> Answer:
    """End a task as failed."""
    return _mark(view, "failed")


def start(view: View) -> Answer:
    """Start a task, whatever its trigger rule says."""
    return _ask(view, "START")


def restart(view: View) -> Answer:
    """Start a task; one that is under way is ended before."""
    return _ask(view, "RESTART")


def stop(view: View) -> Answer:
    """End a task."""
    return _ask(view, "STOP")


def _ask(view: View, move: Literal["START", "RESTART", "STOP"]) -> Answer:
    found = view.store.inspect.find_task(view.given("dag"), view.given("run"), view.given("task").removesuffix("[]"))
    if not view.store.signals.ask(found.id, move):
        raise _ended(view.store.inspect.task(found).line)
    return done(view, "dags", found.dag, "runs", found.run_id, "tasks", found.name.removesuffix("[]"))


def _mark(view: View, mark: Mark) -> Answer:
    from headgate.store.tasks.user_actions import every_instance

    store, dag = view.store, view.given("dag")
    found = store.inspect.find_task(dag, view.given("run"), view.given("task").removesuffix("[]"))
    marked = 0
    if found.map_index < 0 and store.inspect.task(found).line.is_map:

        def mark_some() -> bool:
            nonlocal marked
            ended = store.tasks.mark_map(found.dag_run_id, every_instance(found.task_id), mark)
            marked += ended.tasks
            return ended.is_ended

        _repeat(mark_some)
    else:
        marked = store.tasks.mark(found.id, mark)
    if not marked:
        raise _ended(store.inspect.task(found).line)
    return done(view, "dags", dag, "runs", found.run_id, "tasks", found.name.removesuffix("[]"))


def _repeat(step: Callable[[], bool]) -> None:
    """Call until it is done. Raises `BadRequest` if that takes too long: a part is done then."""
    ends_at = time.monotonic() + CLEAR_S_MAX
    while not step():
        if time.monotonic() > ends_at:
            raise BadRequest("a part is done, and the rest is not: send the form again")
        time.sleep(BUSY_PAUSE_S)


# --- triggers and pools --------------------------------------------------------------------------


def pause_watcher(view: View) -> Answer:
    """Pause a watcher."""
    view.store.pause_watcher(name := view.given("watcher"))
    return _to_watcher(view, name)


def resume_watcher(view: View) -> Answer:
    """Have a watcher go on that is held."""
    view.store.resume_watcher(name := view.given("watcher"))
    return _to_watcher(view, name)


def restart_watcher(view: View) -> Answer:
    """Start the trigger of a watcher again."""
    view.store.restart_watcher(name := view.given("watcher"))
    return _to_watcher(view, name)


def remove_watcher(view: View) -> Answer:
    """Remove a watcher, once that is confirmed."""
    name = view.given("watcher")
    trigger_id, classpath = view.store.watcher_class(name)
    if not view.is_confirmed:
        lines = [f"Its trigger {trigger_id} ({classpath}) is cancelled, as by a user.", "Its events stay."]
        return view.confirm("watchers remove", f"Remove the watcher {name}?", lines, "Remove it")
    view.store.remove_watcher(name)
    return done(view, "watchers")


def _to_watcher(view: View, name: str) -> Answer:
    return done(view, "triggers", view.store.watcher_class(name)[0])


def release(view: View) -> Answer:
    """Release a trigger that is held."""
    trigger_id = view.given_number("trigger")
    view.store.release_trigger(trigger_id, ends_pause=view.may(ACTS["watchers resume"]))
    return done(view, "triggers", trigger_id)


def ask_drift(view: View) -> Answer:
    """Have the broker of a stream asked; or, once that is confirmed, forget what was found of it."""
    stream_id, accepts = view.given_number("stream"), view.field("accepts") is not None
    if accepts and not view.is_confirmed:
        found = worst_first(view.store.inspect.drift([stream_id]).get(stream_id, StreamDrift(stream_id)).found)
        if not found:
            raise BadRequest(f"nothing was found of the stream {stream_id}")
        lines = [*map(finding_text, found[:FINDINGS_TOLD_MAX])]
        if (more := len(found) - FINDINGS_TOLD_MAX) > 0:
            lines.append(f"and {more:,} more, in {len(found):,} lanes in all")
        lines.append("No alert and no page tells of it any more. What is found after this moment is told.")
        # What nobody has seen is not accepted.
        told = {"up_to": repr(max(one.at for one in found))}
        return view.confirm("streams drift", "Accept what was found?", lines, "Accept it", more=told)
    view.store.ask_drift([stream_id], accepts=accepts, up_to=_moment(view.field("up_to")))
    return done(view, "streams", stream_id)


def _moment(text: str | None) -> float:
    try:
        found = math.inf if text is None else float(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise BadRequest(f"{text!r} is no moment")
    return found


def set_pool(view: View) -> Answer:
    """Make a pool, or change its slots."""
    view.store.tasks.set_pool(view.given("pool"), view.given_number("slots"))
    return done(view, "pools")


def delete_pool(view: View) -> Answer:
    """Delete a pool, once that is confirmed."""
    name = view.given("pool")
    if not view.is_confirmed:
        lines = ["No unfinished task may be in it."]
        return view.confirm("pools delete", f"Delete the pool {name}?", lines, "Delete it")
    view.store.tasks.delete_pool(name)
    return done(view, "pools")


# --- signals -------------------------------------------------------------------------------------


def _address(view: View) -> tuple[str, str]:
    """Return a key and its namespace, from a page of the key as they are: only what somebody types is stripped."""
    key, namespace = view.given("key"), view.field("namespace")
    if view.field("is_known") is not None:
        key, namespace = view.exact("key"), view.exact("namespace")
    return key, namespace or DEFAULT_NAMESPACE


def send_signal(view: View) -> Answer:
    """Send a signal: it gets the next version of its key."""
    key, namespace = _address(view)
    value = _encoded(view.field("value") or "null", "value", SIGNAL_BYTES_MAX)
    said = SignalSend(key, value, f"{AUTOMATIC}{view.field('once') or uuid4().hex}", namespace)
    view.store.signals.send([NewSignal.of(said, f"page of {view.user.name}", None)])
    return done(view, "signals", view.store.signals.key(key, namespace).id)


def forget_signal(view: View) -> Answer:
    """Delete a key with all its versions, once that is confirmed."""
    key, namespace = _address(view)
    if not view.is_confirmed:
        lines = ["All its versions are deleted.", "They begin with 1 if it is used again."]
        return view.confirm("signals forget", f"Forget the key {key} of {namespace}?", lines, "Forget it")
    view.store.signals.forget(key, namespace)
    return done(view, "signals")


# --- dead letters --------------------------------------------------------------------------------


def redrive(view: View) -> Answer:
    """Redrive a dead letter, or all of a filter."""
    return _on_letters(view, "dlq redrive", "Redrive")


def edit_letter(view: View) -> Answer:
    """Change what a redrive of a dead letter stores."""
    letter_id = view.given_number("letter")
    payload = _encoded(view.given("payload"), "payload", EVENT_BYTES_MAX)
    view.store.letters.edit(letter_id, payload, by=view.user.name, note=view.field("note") or "")
    return done(view, "dead-letters", letter_id)


def discard(view: View) -> Answer:
    """Discard a dead letter, or all of a filter."""
    return _on_letters(view, "dlq discard", "Discard")


def _verb(store: Store, action: Action, by: str, note: str) -> Callable[[int], Any]:
    if action == "dlq redrive":
        return lambda letter_id: store.letters.redrive(letter_id, by=by, note=note)
    return lambda letter_id: store.letters.discard(letter_id, by=by, note=note)


def _on_letters(view: View, action: Action, word: str) -> Answer:
    act = _verb(view.store, action, view.user.name, view.field("note") or "")
    if view.field("letter") is not None:
        act(letter_id := view.given_number("letter"))
        return done(view, "dead-letters", letter_id)
    watcher, reason = view.field("watcher"), view.field("reason")
    everything = view.field("everything") is not None
    if (watcher is None and reason is None) != everything:
        raise BadRequest("say which: a filter, or everything")
    states = _states(action, view.field("state"))
    which = LetterFilter(watcher=watcher, reason=reason, states=states, is_fit=action == "dlq redrive")
    counts = view.store.inspect.count_letters(which)
    if not view.is_confirmed:
        newest = max((count.newest_id for count in counts), default=0)
        lines = [_counted(one) for one in counts]
        more = {"up_to": str(newest), "after": "0", "done": "0", "failed": "0"}
        return view.confirm(action, f"{word} these?", lines or ["There are none."], word, more=more)
    return _part_of_letters(view, action, word, which, act)


def _counted(one: LetterCount) -> str:
    state = one.state.replace("_", " ")
    return f"{one.letters:,} {one.content} letters of {one.watcher or 'removed watchers'}: {state}"


def _states(action: Action, state: str | None) -> tuple[LetterState, ...]:
    """Return the states of the letters to act on: all that the act takes, or the one of them that a list shows.

    Raises `BadRequest` for a state that it does not take.
    """
    taken: tuple[LetterState, ...] = UNRESOLVED if action == "dlq discard" else ("open",)
    if state in (None, "unresolved"):
        return taken
    wanted: tuple[LetterState, ...] = tuple(one for one in taken if one == state)
    if not wanted:
        raise BadRequest(f"state must be one of unresolved, {', '.join(taken)}, not {state!r}")
    return wanted


def _part_of_letters(view: View, action: Action, word: str, which: LetterFilter, act: Callable[[int], Any]) -> Answer:
    """Act on as many letters as one request may; the answer has the form for the rest, and counts those before."""
    after, up_to = view.given_number("after"), view.given_number("up_to")
    count, failed, is_first = view.given_number("done"), view.given_number("failed"), after == 0
    _go_on_with_row(view, action)
    ends_at, failures, errors = time.monotonic() + LETTERS_S_MAX, 0, list[str]()
    left = True
    while left and failures < FAILURES_MAX and time.monotonic() < ends_at:
        ids = view.store.inspect.letter_ids(which, after_id=after, up_to_id=up_to, limit=100)
        left = bool(ids)
        for letter_id in ids:
            try:
                act(letter_id)
            except LetterResolved:
                pass
            except StoreError as error:
                failures, failed = failures + 1, failed + 1
                errors.append(str(error))
            else:
                failures, count = 0, count + 1
            after = letter_id
            if failures >= FAILURES_MAX or time.monotonic() >= ends_at:
                break
    if not left and is_first and not errors:
        return done(view, "dead-letters")  # which shows the row of the audit
    lines = [f"{count:,} are done.", *errors[:FAILURES_MAX]]
    if failed:
        lines.append(f"{failed:,} could not be done, and are as before.")
    if not left:
        return Page("confirm.html", word, {"lines": lines, "act": None}, lives=False)
    if failures >= FAILURES_MAX:
        lines.append(f"Stopped after {FAILURES_MAX} in a row that could not be done. Go on with those behind them?")
    row = view.store.database.last_act
    more = {"up_to": str(up_to), "after": str(after), "done": str(count), "failed": str(failed)}
    more |= {"row": "" if row is None else str(row)}
    return view.confirm(action, f"{word}: {count:,} done so far", lines, "Go on", more=more, goes_on=not errors)


def _go_on_with_row(view: View, action: Action) -> None:
    """Have this part counted in the row of the audit of those before it, if it may be: all parts are one act.

    The form names the row, and anybody can write a form: only one of this user and act is taken, of a moment ago.
    """
    row = None if view.field("row") is None else view.store.inspect.act(view.given_number("row"))
    of_parts = (view.user.name, "web", action, LETTERS, "done")
    if row is None or (row.actor, row.via, row.action, row.object, row.outcome) != of_parts:
        return
    if (view.now - row.at).total_seconds() <= ONE_ROW_S_MAX and row.after is not None:
        view.store.database.go_on_with(Written(row.id, action, LETTERS, row.after))


HANDLERS: Final[dict[Action, Handler]] = {
    "dags pause": pause_dag,
    "dags unpause": unpause_dag,
    "dags trigger": trigger_dag,
    "runs cancel": cancel_run,
    "runs end": end_run,
    "tasks clear": clear,
    "tasks mark-success": mark_success,
    "tasks mark-failed": mark_failed,
    "tasks start": start,
    "tasks restart": restart,
    "tasks stop": stop,
    "signals send": send_signal,
    "triggers release": release,
    "streams drift": ask_drift,
    "dlq redrive": redrive,
    "dlq edit": edit_letter,
    "dlq discard": discard,
    "watchers pause": pause_watcher,
    "watchers resume": resume_watcher,
    "watchers restart": restart_watcher,
    "watchers remove": remove_watcher,
    "pools set": set_pool,
    "pools delete": delete_pool,
    "signals forget": forget_signal,
}
