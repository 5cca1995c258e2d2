"""``headgate events tail|put`` and ``consumers``: the events of a watcher as they come, by hand, and who reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.commands.events import events_app
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, WideOption, print_structs
from headgate.cli.options import json_value
from headgate.cli.output import json_line, readable
from headgate.cli.tables import Column, cell, print_block
from headgate.presentation.moments import exact
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.runner import EVENT_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.scheduling.words import counted, error_line

if TYPE_CHECKING:
    from headgate.client import Event

consumers_app = typer.Typer(help="Programs that get the events of watchers, by name.", no_args_is_help=True)

TAIL_EVENTS = 10  # before those to come, if the user does not say


def _behind(consumer: Any) -> str:
    from headgate.store.consuming.consumers import BEHIND_COUNTED_MAX

    behind: int = consumer.behind
    return f"{behind:,}" if behind <= BEHIND_COUNTED_MAX else f"more than {BEHIND_COUNTED_MAX:,}"


_CONSUMERS_SHOWN: tuple[Column, ...] = (
    *("name", "watcher"),
    ("place", lambda consumer: str(consumer.cursor)),
    ("behind", _behind),
    "oldest_at",
    *("handed_over", "moved_at", "created_date", "max_deliveries"),
    ("failures", lambda consumer: consumer.failures or None),
    ("set_aside", lambda consumer: consumer.set_aside or None),
    ("last_error", lambda consumer: error_line(consumer.last_error or "") if consumer.failures else None),
)
_LETTERS_SHOWN: tuple[Column, ...] = (
    *("event_id", "deliveries", "set_aside_at"),
    ("state", lambda letter: letter.state if letter.state != "open" else None),
    ("error", lambda letter: error_line(letter.error)),
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The consumer's name.")]
EventsArgument = Annotated[
    list[int] | None, typer.Argument(metavar="[EVENT_ID]...", min=1, help="The ids of events that were set aside.")
]
EveryOption = Annotated[bool, typer.Option("--all", help="All events that this consumer has set aside.")]


@events_app.command("tail")
def tail(
    ctx: typer.Context,
    watcher: Annotated[str, typer.Argument(metavar="WATCHER", help="The watcher's name.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with those to come, until Ctrl-C.")] = False,
    after: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Print all after this place, as --json prints it.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="With --follow: wait for the next no longer than this."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the newest events of a watcher, or those after a cursor, in the order in which they were committed.

    With --timeout the exit code is 1 if none came in time, besides those that were stored before.
    """
    from headgate.client import START, Client, Cursor

    if timeout is not None and not follow:
        raise CommandError("--timeout goes with --follow: without it nothing is waited for", exit_code=2)
    old: set[int] = set()  # shown first, and not waited for
    with invocation(ctx).store() as store:
        client = Client(store.database)
        if after is None:
            newest = store.inspect.newest_events(watcher=watcher, limit=TAIL_EVENTS)
            old = {event.id for event in newest}
            cursor = Cursor(newest[0].trigger_id, newest[0].id - 1) if newest else START
        else:
            cursor = Cursor.parse(after)
        events = client.follow(watcher, after=cursor, idle_s=timeout if follow else 0.0)
        came = _print_events(events, old, as_json=as_json)
    if timeout is not None and not came:
        raise CommandError(f"no event of {watcher} came within {timeout:g} s")


def _print_events(events: Iterable[Event], old: Collection[int], *, as_json: bool) -> bool:
    """Print events; return whether one was none of ``old``."""
    came = False
    for event in events:
        came = came or event.id not in old
        try:
            payload = readable(event.payload)
        except ProtocolError:  # of a type that only the user's program knows
            payload = event.data.decode(errors="replace")
        if as_json:
            row = {name: getattr(event, name) for name in event.__struct_fields__ if name != "data"}
            line = json_line(row | {"payload": payload, "cursor": str(event.cursor)})
        else:
            line = "  ".join([exact(event.stored_at), str(event.id), event.key or "-", cell(payload)])
        sys.stdout.write(line + "\n")
        sys.stdout.flush()  # each line when it comes, also into a pipe
    return came


@events_app.command("put")
def put(
    ctx: typer.Context,
    watcher: Annotated[str, typer.Argument(metavar="WATCHER", help="The watcher's name.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="The payload.")],
    key: Annotated[str | None, typer.Option(metavar="K", help="Its key, which the watcher must not have yet.")] = None,
) -> None:
    """Store an event of a watcher by hand, with all that follows from an event: runs of DAGs begin for it."""
    data = encode_value(json_value(payload, "JSON"), where="payload", bytes_max=EVENT_BYTES_MAX)
    with invocation(ctx).store() as store:
        print(f"stored event {store.put_event(watcher, data, key=key)} of {watcher}")


@consumers_app.command("list")
def list_consumers(ctx: typer.Context, wide: WideOption = False, as_json: JsonOption = False) -> None:
    """List the consumers: how far each has got, and how many events it has yet to get."""
    with invocation(ctx).store() as store:
        print_structs(store.consumers.all(), _CONSUMERS_SHOWN, as_json=as_json, wide=wide)


@consumers_app.command("remove")
def remove_consumer(ctx: typer.Context, name: NameArgument) -> None:
    """Remove a consumer, its place and its letters. Events are not kept for it any more."""
    with invocation(ctx).store() as store:
        store.consumers.remove(name)
    print(f"removed consumer {name}")


@consumers_app.command("set")
def set_consumer(
    ctx: typer.Context,
    name: NameArgument,
    max_deliveries: Annotated[
        int,
        typer.Option(
            "--max-deliveries", metavar="N", min=0, help="Set an event aside that has failed alone N times; 0: never."
        ),
    ],
) -> None:
    """Change a consumer. It stays where it is."""
    with invocation(ctx).store() as store:
        store.consumers.set_max_deliveries(name, max_deliveries)
    print(f"changed consumer {name}")


@consumers_app.command("letters")
def letters(
    ctx: typer.Context,
    name: NameArgument,
    everything: Annotated[bool, typer.Option("--all", help="Those that are resolved, too.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the errors whole.")] = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the events that a consumer has set aside because its program failed on each again and again."""
    with invocation(ctx).store() as store:
        found = store.consumers.letters(name, resolved=everything)
    if traceback and not as_json:
        for letter in found:
            print(f"event {letter.event_id}, delivered {letter.deliveries:,} times:")
            print_block(letter.traceback or letter.error)
        return
    print_structs(found, _LETTERS_SHOWN, as_json=as_json, wide=wide)


@consumers_app.command("redeliver")
def redeliver(
    ctx: typer.Context, name: NameArgument, events: EventsArgument = None, everything: EveryOption = False
) -> None:
    """Hand events that were set aside over again, each once, in a batch of its own, as soon as the program asks."""
    with invocation(ctx).store() as store:
        done = _of_letters(store.consumers.redeliver, name, events, everything=everything)
    print(f"{name} gets {done} again, before those that it has not got yet")


@consumers_app.command("discard")
def discard(
    ctx: typer.Context, name: NameArgument, events: EventsArgument = None, everything: EveryOption = False
) -> None:
    """Resolve events that were set aside without handing them over: they are not wanted."""
    with invocation(ctx).store() as store:
        done = _of_letters(store.consumers.discard, name, events, everything=everything)
    print(f"discarded {done} of {name}")


def _of_letters(
    verb: Callable[[str, int | None], int], consumer: str, events: list[int] | None, *, everything: bool
) -> str:
    """Do something with the letters of these events, or with all of a consumer; return how many they were, as text.

    Raises `CommandError` if it is not clear which.
    """
    if bool(events) == everything:
        raise CommandError("say which events: either their ids or --all", exit_code=2)
    wanted: Iterable[int | None] = dict.fromkeys(events) if events else (None,)
    count = sum(verb(consumer, event_id) for event_id in wanted)
    return counted(count, "event")
