"""``headgate dlq``: events that could not be stored, messages that triggers could not take, and what is done with them.

Redriving and discarding take ids, or a filter, or ``--all``. Each letter is a transaction of its own, so a command that
is interrupted has left each letter either done or open, and the same command goes on where it was. Messages that are on
their way to their triggers then arrive without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import msgspec
import typer

from headgate.cli.invocation import CommandError, invocation, standard_input, user_name
from headgate.cli.lists import (
    ID_MAX,
    JsonOption,
    LimitOption,
    WideOption,
    print_json_lines,
    print_record,
    print_structs,
)
from headgate.cli.options import json_value
from headgate.cli.output import json_line, payload
from headgate.cli.progress import ProgressShown
from headgate.cli.tables import Column, fields, print_block, print_table
from headgate.protocol.values import encode_value
from headgate.scheduling.words import counted, error_line
from headgate.store.errors import (
    DatabaseAway,
    LetterRefused,
    LetterResolved,
    LetterWithoutTrigger,
    NoSuchRow,
    OwnerUnsettled,
    RowsRefused,
    TriggerRemoved,
)

if TYPE_CHECKING:
    from headgate.store.inspect.letters import DeadLetterRow, LetterFilter
    from headgate.store.store import Store

app = typer.Typer(
    help="Events that could not be stored, and messages that triggers could not take.", no_args_is_help=True
)

LETTERS_PER_BATCH_MAX = 100  # ids read at a time; each letter is a transaction of its own
MESSAGES_ON_THEIR_WAY_MAX = 100  # given to their triggers and not settled; more are given when some are
UNSETTLED = ("open", "at_broker")  # the states of a message that its trigger could not take
LOOK_INTERVAL_S = 0.1  # between two looks at the messages that are on their way
WAIT_S = 60.0  # for a trigger to settle some message, if the user says nothing else
FAILURES_IN_A_ROW_MAX = 10  # then what is wrong is not the letters

# What a letter, or its trigger, may be the reason of; the next one may do better.
_FAILURES = (LetterRefused, NoSuchRow, RowsRefused, TriggerRemoved, OwnerUnsettled, DatabaseAway)

_SHOWN: tuple[Column, ...] = (
    *("id", "watcher", "content"),
    ("kind", lambda letter: letter.kind if letter.kind != "event" else None),
    ("state", lambda letter: letter.state if letter.resolved_at or letter.state == "redriving" else None),
    *("key", "deliveries", "stored_at"),
    ("bytes", lambda letter: letter.payload_bytes),
    ("whole", lambda letter: letter.payload_kept),
    ("last_error", lambda letter: error_line(letter.reason)),
)
_COUNTS_SHOWN: tuple[Column, ...] = (
    *("watcher", "content", "state", "letters"),
    ("bytes", lambda count: count.payload_bytes),
)


class Content(StrEnum):
    """What a letter holds."""

    event = "event"
    message = "message"
    undecoded = "undecoded"


class State(StrEnum):
    """Which letters are listed: those of a state, or of several."""

    unresolved = "unresolved"
    open = "open"
    at_broker = "at_broker"
    redriving = "redriving"
    redriven = "redriven"
    stored_meanwhile = "stored_meanwhile"
    discarded = "discarded"
    all = "all"


IdArgument = Annotated[int, typer.Argument(metavar="ID", min=1, max=ID_MAX, help="Its id, as `dlq list` prints it.")]
IdsArgument = Annotated[list[int] | None, typer.Argument(metavar="[ID]...", min=1, max=ID_MAX, help="Their ids.")]
WatcherOption = Annotated[
    str | None, typer.Option("--watcher", metavar="NAME", help="Only letters of watchers that have or had this name.")
]
ContentOption = Annotated[Content | None, typer.Option("--content", help="Only letters that hold this.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Only letters whose reason contains this text.")
]
EveryOption = Annotated[bool, typer.Option("--all", help="All letters, if there is no filter.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count the letters; change nothing.")]
NoteOption = Annotated[str, typer.Option("--note", metavar="TEXT", help="Why, for the record of the letter.")]


# --- reading -------------------------------------------------------------------------------------


@app.command("list")
def list_dead_letters(
    ctx: typer.Context,
    watcher: WatcherOption = None,
    content: ContentOption = None,
    reason: ReasonOption = None,
    state: Annotated[
        State, typer.Option("--state", help="Letters of a state; by default those that nobody has resolved.")
    ] = State.unresolved,
    limit: LimitOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the dead letters, the newest first: what the database, the runner or a trigger could not take, and why."""
    which = _filter(watcher, content, reason, state)
    with invocation(ctx).store() as store:
        limits = {} if limit is None else {"limit": limit}
        letters = store.inspect.dead_letters(which=which, **limits)
    print_structs(letters, _SHOWN, as_json=as_json, wide=wide, payload_columns=("payload_head",))


@app.command()
def show(
    ctx: typer.Context,
    letter: IdArgument,
    raw: Annotated[bool, typer.Option("--raw", help="Print only the payload, as the bytes that were stored.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter: where it comes from, its error, its payload as far as it is kept, and what was done to it."""
    with invocation(ctx).store() as store:
        found = store.inspect.dead_letter(letter)
    row = found.row
    if raw:
        if found.payload is None:
            head, whole = len(row.payload_head), row.payload_bytes
            raise CommandError(f"dead letter {letter} has only the first {head:,} of {whole:,} bytes of its payload")
        sys.stdout.buffer.write(found.payload)
        return
    record = fields(row, [name for name in row.__struct_fields__ if name not in ("reason", "payload_head")])
    content = payload(row.payload_head if found.payload is None else found.payload)
    if as_json:
        more = {"reason": row.reason, "traceback": found.traceback, "payload": content}
        more |= {"edited_payload": payload(found.edited_payload), "actions": list(found.actions)}
        print_record(record | more, as_json=True)
        return
    print_record(record | {"error": error_line(row.reason)}, as_json=False)
    if found.traceback or row.reason != error_line(row.reason):
        print("\ntraceback:" if found.traceback else "\nwhole error:")
        print_block(found.traceback or row.reason)
    if found.actions:
        print("\nwhat was done:")
        print_table(found.actions, ("action", "done_by", "done_at", "note"))
    if found.edited_payload is not None:
        print("\nedited payload:")
        print_block(json_line(payload(found.edited_payload)))
    if found.payload is not None:
        print("\npayload:")
        print_block(json_line(content))
    elif row.payload_head:
        print(f"\nthe first {len(row.payload_head):,} bytes of its payload:")
        print_block(content if isinstance(content, str) else json_line(content))


# --- acting --------------------------------------------------------------------------------------


@app.command()
def redrive(
    ctx: typer.Context,
    letters: IdsArgument = None,
    watcher: WatcherOption = None,
    content: ContentOption = None,
    reason: ReasonOption = None,
    everything: EveryOption = False,
    dry_run: DryRunOption = False,
    note: NoteOption = "",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for triggers to take messages.")
    ] = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Store the events of open dead letters: each once, also if its broker delivers the message again meanwhile.

    A message is given to its trigger once more, and its events are stored when the trigger makes them. Give ids, or a
    filter, or --all, which leave out letters that cannot be redriven as they are; look with --dry-run first. It stops
    after 10 failures in a row, and goes on where it was if it is called again.
    """
    which = _wanted(letters, watcher, content, reason, State.open, everything=everything, dry_run=dry_run)
    event_bytes_max = invocation(ctx).settings().event_bytes_max
    with invocation(ctx).store() as store:
        by = user_name()

        def act(letter_id: int) -> dict[str, Any]:
            done = store.letters.redrive(letter_id, by=by, note=note, payload_bytes_max=event_bytes_max)
            told = {"id": letter_id, "state": done.state, "event_id": done.event_id, "is_same": done.is_same}
            if not done.unhandled:
                return told
            print(f"headgate: dead letter {letter_id}: its event is stored, but {done.unhandled}", file=sys.stderr)
            return told | {"unhandled": done.unhandled}

        which = None if which is None else _fit(store, which)
        if dry_run and which is not None:
            _print_counts(store, which, as_json=as_json)
        else:
            chosen = _chosen(store, letters, which)
            _Acting(act, "redriven", chosen, as_json=as_json, on_the_way=_OnTheWay(store, wait)).run()


@app.command()
def discard(
    ctx: typer.Context,
    letters: IdsArgument = None,
    watcher: WatcherOption = None,
    content: ContentOption = None,
    reason: ReasonOption = None,
    everything: EveryOption = False,
    dry_run: DryRunOption = False,
    note: NoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Resolve dead letters without storing anything: their events and messages are not wanted.

    Give ids, or a filter, or --all; look with --dry-run first. A message that is refused again gets another letter.
    """
    which = _wanted(letters, watcher, content, reason, State.unresolved, everything=everything, dry_run=dry_run)
    with invocation(ctx).store() as store:
        by = user_name()

        def act(letter_id: int) -> dict[str, Any]:
            store.letters.discard(letter_id, by=by, note=note)
            return {"id": letter_id, "state": "discarded"}

        if dry_run and which is not None:
            _print_counts(store, which, as_json=as_json)
        else:
            _Acting(act, "discarded", _chosen(store, letters, which), as_json=as_json).run()


@app.command()
def edit(
    ctx: typer.Context,
    letter: IdArgument,
    new_payload: Annotated[
        str | None, typer.Option("--payload", metavar="JSON", help="What is to be stored in place of its payload.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--payload-file", metavar="FILE", help="The same from a file; - is standard input.")
    ] = None,
    note: NoteOption = "",
) -> None:
    """Change what the redrive of an open dead letter will store; its original payload is kept and shown, too.

    Values that JSON lacks are written with a tag, as in `watchers add --kwargs`.
    """
    if (new_payload is None) == (file is None):
        raise CommandError("give the new payload: either --payload or --payload-file", exit_code=2)
    option = "--payload" if file is None else "--payload-file"
    text = _read(file) if file is not None else new_payload or ""
    value = json_value(text, option)
    encoded = encode_value(value, where="payload", bytes_max=invocation(ctx).settings().event_bytes_max)
    with invocation(ctx).store() as store:
        store.letters.edit(letter, encoded, by=user_name(), note=note)
    print(f"edited dead letter {letter}; `headgate dlq redrive {letter}` goes on with its new payload")


def _read(file: Path) -> str:
    try:
        return standard_input().read() if str(file) == "-" else file.read_text()
    except UnicodeDecodeError as exc:
        raise CommandError(f"--payload-file: {file} is not text in UTF-8: {exc.reason}", exit_code=2) from exc


# --- many ----------------------------------------------------------------------------------------


class _Chosen(NamedTuple):
    """The letters that a command is about, and how many there are at most."""

    ids: Iterator[int]
    total: int
    are_named: bool


def _filter(watcher: str | None, content: Content | None, reason: str | None, state: State) -> LetterFilter:
    from headgate.store.ids import LetterState
    from headgate.store.inspect.letters import UNRESOLVED, LetterFilter

    if reason is not None and not reason.strip():
        raise CommandError("--reason must not be empty: each reason contains that", exit_code=2)
    states: tuple[LetterState, ...] | None = UNRESOLVED
    if state is State.all:
        states = None
    elif state is not State.unresolved:
        states = tuple(one for one in get_args(LetterState) if one == state.value)
    return LetterFilter(watcher, None if content is None else content.value, reason, states)


def _wanted(
    letters: list[int] | None,
    watcher: str | None,
    content: Content | None,
    reason: str | None,
    state: State,
    *,
    everything: bool,
    dry_run: bool,
) -> LetterFilter | None:
    """Return the filter of a command that was not given ids; None if it was. Raises `CommandError`."""
    is_filtered = not (watcher is None and content is None and reason is None)
    if sum((bool(letters), is_filtered, everything)) != 1:
        raise CommandError("say which dead letters: either ids, or a filter, or --all", exit_code=2)
    if letters and dry_run:
        raise CommandError("--dry-run counts the letters of a filter or of --all, not ids", exit_code=2)
    return None if letters else _filter(watcher, content, reason, state)


def _fit(store: Store, which: LetterFilter) -> LetterFilter:
    """Return the filter for those letters that can be redriven as they are; say how many others there are."""
    fit = msgspec.structs.replace(which, is_fit=True)
    all_of, fit_of = (sum(one.letters for one in store.inspect.count_letters(each)) for each in (which, fit))
    if others := all_of - fit_of:
        left = f"{counted(others, 'letter')} left out, of messages that could not be decoded or have no key"
        print(f"headgate: {left}: `headgate dlq edit` makes the first fit", file=sys.stderr)
    return fit


def _print_counts(store: Store, which: LetterFilter, *, as_json: bool) -> None:
    print_structs(store.inspect.count_letters(which), _COUNTS_SHOWN, as_json=as_json)


def _chosen(store: Store, letters: list[int] | None, which: LetterFilter | None) -> _Chosen:
    """Return the letters with these ids, or those of the filter that are there now."""
    if letters or which is None:
        ids = list(dict.fromkeys(letters or ()))
        return _Chosen(iter(ids), len(ids), are_named=True)
    counts = store.inspect.count_letters(which)
    newest_id = max((count.newest_id for count in counts), default=0)
    return _Chosen(_ids(store, which, newest_id), sum(count.letters for count in counts), are_named=False)


def _ids(store: Store, which: LetterFilter, newest_id: int) -> Iterator[int]:
    """Iterate over the letters up to an id, the oldest first; those that come meanwhile are left for the next call."""
    after_id = 0
    while batch := store.inspect.letter_ids(which, after_id=after_id, up_to_id=newest_id, limit=LETTERS_PER_BATCH_MAX):
        yield from batch
        after_id = batch[-1]


class _OnTheWay:
    """Messages that were redriven, and that their triggers have not settled yet, the oldest first.

    A look that finds none settled for ``wait_s`` seconds is the last one.
    """

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store = store
        self._wait_s = wait_s
        self._settled_at = time.monotonic()
        self.letters: dict[int, None] = {}

    def add(self, letter_id: int) -> None:
        """Add a message that is on its way from now on."""
        if not self.letters:
            self._settled_at = time.monotonic()
        self.letters[letter_id] = None

    def settled(self) -> list[DeadLetterRow]:
        """Wait until some are settled, and return these; none if none is for too long."""
        while True:
            states = self._store.inspect.letters_by_id(list(self.letters))
            settled = [letter for letter in states if letter.state != "redriving"]
            if settled or time.monotonic() - self._settled_at >= self._wait_s:
                break
            time.sleep(LOOK_INTERVAL_S)
        if settled:
            self._settled_at = time.monotonic()
        for letter in settled:
            del self.letters[letter.id]
        return settled


class _Acting:
    """One action on each of many letters. ``on_the_way`` has the messages for which it waits; None if it has none."""

    def __init__(
        self,
        act: Callable[[int], dict[str, Any]],
        verb: str,
        chosen: _Chosen,
        *,
        as_json: bool,
        on_the_way: _OnTheWay | None = None,
    ) -> None:
        self._act = act
        self._verb = verb
        self._chosen = chosen
        self._as_json = as_json
        self._on_the_way = on_the_way
        self._counts: dict[str, int] = {}
        self._in_a_row = 0
        self._settled = 0

    def run(self) -> None:
        """Act on each letter, and say what became of it. Raises `CommandError` if any failed."""
        with ProgressShown(self._verb, "dead letters", self._chosen.total) as progress:
            for letter_id in self._chosen.ids:
                self._act_on(letter_id)
                if self._on_the_way is not None and len(self._on_the_way.letters) >= MESSAGES_ON_THEIR_WAY_MAX:
                    self._await_some(self._on_the_way)
                progress.update(self._settled)
                if self._is_stopped:
                    break
            while self._on_the_way is not None and self._on_the_way.letters and not self._is_stopped:
                self._await_some(self._on_the_way)
                progress.update(self._settled)
        self._conclude()

    @property
    def _is_stopped(self) -> bool:
        return self._in_a_row >= FAILURES_IN_A_ROW_MAX or "on their way" in self._counts

    def _act_on(self, letter_id: int) -> None:
        try:
            done = self._act(letter_id)
        except LetterResolved as exc:
            if self._chosen.total == 1 and self._chosen.are_named:
                raise
            self._count("resolved by others", {"id": letter_id, "error": str(exc)})
        except LetterWithoutTrigger as exc:
            self._fail(letter_id, str(exc), is_alone=True)
        except _FAILURES as exc:
            self._fail(letter_id, str(exc))
        else:
            if done["state"] == "redriving" and self._on_the_way is not None:
                self._on_the_way.add(letter_id)
            else:
                self._succeed(done)

    def _await_some(self, on_the_way: _OnTheWay) -> None:
        """Wait for messages that are on their way; give up those that no trigger takes."""
        settled = on_the_way.settled()
        for letter in settled:
            if letter.state in UNSETTLED:
                self._fail(letter.id, f"dead letter {letter.id} is open again: {error_line(letter.reason)}")
            else:
                done = {"id": letter.id, "state": letter.state, "event_id": letter.event_id, "is_same": True}
                self._succeed(done)
        if not settled:
            for letter_id in on_the_way.letters:
                self._count("on their way", {"id": letter_id, "state": "redriving"})

    def _succeed(self, done: dict[str, Any]) -> None:
        self._in_a_row = 0
        self._count(done["state"].replace("_", " "), done)

    def _fail(self, letter_id: int, error: str, *, is_alone: bool = False) -> None:
        self._in_a_row += not is_alone  # which says nothing about other letters
        print(f"headgate: {error}", file=sys.stderr)
        self._count("failed", {"id": letter_id, "error": error})

    def _count(self, what: str, done: dict[str, Any]) -> None:
        self._settled += 1
        self._counts[what] = self._counts.get(what, 0) + 1
        if self._as_json:
            print_json_lines([done])

    def _conclude(self) -> None:
        counts = self._counts
        if not self._as_json:
            print(", ".join(f"{state}: {count:,}" for state, count in counts.items()) or "there is no such dead letter")
        if self._in_a_row >= FAILURES_IN_A_ROW_MAX:
            raise CommandError(
                f"stopped after {FAILURES_IN_A_ROW_MAX} failures in a row; the other letters are as before"
            )
        if waiting := counts.get("on their way"):
            raise CommandError(
                f"{counted(waiting, 'message')} on the way to their triggers, which get them as soon as they run: "
                "`headgate why WATCHER` says why one does not run"
            )
        if "failed" in counts:
            raise CommandError(
                f"{counted(counts['failed'], 'dead letter')} could not be {self._verb}; nothing was changed there"
            )
