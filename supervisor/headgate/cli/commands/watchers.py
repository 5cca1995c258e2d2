"""``headgate watchers``: event triggers that run without a task."""

from __future__ import annotations

import keyword
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, WideOption, print_structs
from headgate.cli.options import json_object
from headgate.cli.sources import SOURCES, parse_source
from headgate.cli.tables import Column

if TYPE_CHECKING:
    from headgate.store.store import Store

app = typer.Typer(help="Watchers: event triggers that run on their own, by name.", no_args_is_help=True)

_SHOWN: tuple[Column, ...] = (
    *("name", "asset", "signal", "classpath", "queue", "triggerer_id", "created_date"),
    ("failures", lambda watcher: watcher.failure_count or None),
    *("hold", "last_error", "finished_at"),
)
KWARGS_HELP = (
    "The trigger's keyword arguments, a JSON object. What JSON lacks is written as an object with a tag: "
    """{"$": "timedelta", "v": [DAYS, SECONDS, MICROSECONDS]}, {"$": "datetime", "v": "2026-01-31T12:00:00+00:00"}, """
    """{"$": "bytes", "v": BASE64}, {"$": "decimal", "v": "0.10"}, {"$": "tuple", "v": [...]}."""
)
MAX_DELIVERIES_HELP = (
    "After N failures on one message of a shared stream, the message becomes a dead letter, and the trigger goes on "
    "without it: 5 by default, at most 1,000; 0: never, and if the message ends the runner again and again the trigger "
    "is quarantined."
)
FROM_HELP = (
    "In place of class and kwargs, a source: redis://CONNECTION/STREAM?group=GROUP, postgres://CONNECTION/TABLE, "
    "rabbitmq://CONNECTION/QUEUE, nats://CONNECTION/STREAM?durable=CONSUMER, sqs://CONNECTION/QUEUE, "
    "kafka://CONNECTION/TOPIC?group=GROUP, mqtt://CONNECTION/TOPIC?client_id=NAME or "
    "webhook://CONNECTION/PATH?verify=SCHEME, with the name of a stored connection, and in the query further arguments "
    "of the trigger, such as in_flight_max=100."
)
SIGNAL_HELP = "Each of its events is sent as a signal under this key, in the transaction that stores the event."
NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Do not try the class and its kwargs: this machine need not have it.")
]


@app.command()
def add(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name of your choice; events are listed by it.")],
    classpath: Annotated[str | None, typer.Argument(help="The trigger class, as package.module.Class.")] = None,
    kwargs: Annotated[str | None, typer.Option(metavar="JSON", help=KWARGS_HELP)] = None,
    source: Annotated[str | None, typer.Option("--from", metavar="SOURCE", help=FROM_HELP)] = None,
    queue: Annotated[str, typer.Option(metavar="Q", help="Only triggerers with this queue run it.")] = "default",
    asset: Annotated[str | None, typer.Option(metavar="A", help="The asset that its events are about.")] = None,
    signal: Annotated[str | None, typer.Option(metavar="KEY", help=SIGNAL_HELP)] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NS", help="The namespace of --signal.")] = None,
    max_deliveries: Annotated[int | None, typer.Option(metavar="N", help=MAX_DELIVERIES_HELP)] = None,
    no_check: NoCheckOption = False,
) -> None:
    """Add a watcher, if its class can be imported and takes these kwargs: this is tried in a process of its own.

    Like the runner, that looks for the class in import_paths, too. With --from a trigger of a broker is named by a URI.
    """
    classpath, found = _class_and_kwargs(classpath, kwargs, source)
    if classpath is None:
        raise CommandError("give the class of the trigger, or --from", exit_code=2)
    given = found or {}
    if namespace is not None and signal is None:
        raise CommandError("--namespace is that of --signal, which is not given", exit_code=2)
    more: dict[str, Any] = {} if max_deliveries is None else {"max_deliveries": max_deliveries}
    if namespace is not None:
        more["namespace"] = namespace
    with invocation(ctx).store() as store:
        if not no_check:
            check_loads(ctx, store, name, classpath, encode_kwargs(given))
        store.add_watcher(name, classpath, given, queue=queue, asset=asset, signal=signal, **more)
        print(f"added watcher {name}; once a supervisor runs, see `headgate why {name}`")
        _tell_of_connection(store, classpath, given)


@app.command("set")
def set_watcher(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The watcher's name.")],
    kwargs: Annotated[str | None, typer.Option(metavar="JSON", help=f"{KWARGS_HELP} They replace all others.")] = None,
    classpath: Annotated[str | None, typer.Option(metavar="PATH", help="The class, as package.module.Class.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="SOURCE", help=f"{FROM_HELP} All are replaced.")
    ] = None,
    queue: Annotated[str | None, typer.Option(metavar="Q", help="Only triggerers with this queue run it.")] = None,
    max_deliveries: Annotated[int | None, typer.Option(metavar="N", help=MAX_DELIVERIES_HELP)] = None,
    no_check: NoCheckOption = False,
) -> None:
    """Change a watcher; what is not given stays as it is. Its events, its last event and its keys stay.

    Its trigger is started again with the new values; its shared stream waits meanwhile. A new class or new kwargs are
    tried before, as by `add`. Another queue can be given only to a watcher that is alone in its shared stream.
    `headgate triggers show NAME --kwargs` prints the present ones.
    """
    if (kwargs, classpath, source, queue, max_deliveries) == (None,) * 5:
        raise CommandError(
            f"nothing to change: give --kwargs, --classpath, --from, --queue or --max-deliveries; `headgate watchers "
            f"restart {name}` starts it again as it is",
            exit_code=2,
        )
    classpath, given = _class_and_kwargs(classpath, kwargs, source)
    with invocation(ctx).store() as store:
        if not no_check and (classpath is not None or given is not None):
            trigger_id, class_now = store.watcher_class(name)
            kwargs_then = store.inspect.trigger_kwargs(trigger_id) if given is None else encode_kwargs(given)
            check_loads(ctx, store, name, classpath or class_now, kwargs_then)
        changed = store.change_watcher(
            name, classpath=classpath, kwargs=given, queue=queue, max_deliveries=max_deliveries
        )
        if given is not None:
            _tell_of_connection(store, classpath or store.watcher_class(name)[1], given)
    if changed.is_finished:
        print(f"changed watcher {name}, which has returned; `headgate watchers restart {name}` runs it again")
    elif changed.hold is not None:
        print(f"changed watcher {name}, which is held ({changed.hold}); `headgate watchers resume {name}` starts it")
    else:
        print(f"changed watcher {name}; a supervisor starts it again with the new values, see `headgate why {name}`")


def _class_and_kwargs(
    classpath: str | None, kwargs: str | None, source: str | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the class and the kwargs that are given, the source in place of both."""
    if source is not None and (classpath, kwargs) != (None, None):
        raise CommandError("--from names class and kwargs: give either it or these", exit_code=2)
    if source is not None:
        return parse_source(source)
    if classpath is not None:
        check_classpath(classpath)
    return classpath, None if kwargs is None else parse_kwargs(kwargs)


def _tell_of_connection(store: Store, classpath: str, kwargs: dict[str, Any]) -> None:
    """Warn of a connection of a broker that is not there yet: supervisors may have it in their environment."""
    from headgate.supervisor.queries import CONNECTION_PREFIX

    name = kwargs.get("connection")
    is_broker = any(source.classpath == classpath for source in SOURCES.values())
    if not is_broker or not isinstance(name, str) or f"{CONNECTION_PREFIX}{name.upper()}" in os.environ:
        return
    if all(stored.name != name for stored in store.tasks.connections.listed()):
        print(
            f"no connection {name!r} is stored: until `headgate connections set {shlex.quote(name)}`, or "
            f"{CONNECTION_PREFIX}{name.upper()} in the environment of its supervisor, it fails",
            file=sys.stderr,
        )


@app.command()
def restart(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The watcher's name.")]) -> None:
    """Start the trigger of a watcher again, even if it has returned. Its events, its last event and its keys stay."""
    with invocation(ctx).store() as store:
        was_finished = store.restart_watcher(name)
    print(f"watcher {name} had returned, and runs again" if was_finished else f"watcher {name} is started again")


@app.command()
def remove(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The watcher's name.")]) -> None:
    """Remove a watcher. Its trigger is cancelled as by a user; its events stay."""
    with invocation(ctx).store() as store:
        store.remove_watcher(name)
    print(f"removed watcher {name}")


@app.command()
def pause(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The watcher's name.")]) -> None:
    """Pause a watcher: its trigger is cancelled, and not started until it is resumed.

    Other watchers of its shared stream go on without it: messages that they take meanwhile do not come to it again.
    """
    with invocation(ctx).store() as store:
        store.pause_watcher(name)
    print(f"paused watcher {name}; `headgate watchers resume {name}` starts it again")


@app.command()
def resume(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The watcher's name.")]) -> None:
    """Start a watcher again that is paused, or held for any other reason."""
    with invocation(ctx).store() as store:
        hold = store.resume_watcher(name)
    print(f"watcher {name} is not held" if hold is None else f"resumed watcher {name} (it was held: {hold})")


@app.command("list")
def list_watchers(ctx: typer.Context, wide: WideOption = False, as_json: JsonOption = False) -> None:
    """List the watchers."""
    with invocation(ctx).store() as store:
        print_structs(store.inspect.watchers(), _SHOWN, as_json=as_json, wide=wide)


def check_classpath(classpath: str) -> None:
    """Check the form of a classpath; the class itself is users' code, and not imported in this process.

    Raises `CommandError`.
    """
    parts = classpath.split(".")
    if len(parts) < 2 or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise CommandError(f"{classpath!r} is not a classpath, which looks like package.module.Class", exit_code=2)


def encode_kwargs(kwargs: dict[str, Any]) -> bytes:
    """Return keyword arguments as they are stored, before they are encrypted. Raises as `Store.add_watcher` does."""
    from headgate.store.triggers import watchers

    return watchers.encode_kwargs(kwargs)


def check_loads(ctx: typer.Context, store: Store, name: str, classpath: str, kwargs: bytes) -> None:
    """Check in a process of its own that the trigger of a watcher can be constructed.

    Say which other watchers read its stream with other arguments. Raises `CommandError`, which says what is wrong.
    """
    from headgate.protocol.messages.checks import OTHERS_MAX, OtherTrigger
    from headgate.supervisor.children.checker import check_trigger
    from headgate.supervisor.children.isolation import user_named
    from headgate.supervisor.children.process import environment_of_children

    settings = invocation(ctx).resolve().settings
    environment = environment_of_children(settings, store.database.engine.url)
    try:
        run_as = None if settings.runner_user is None else user_named(settings.runner_user)
        checked = check_trigger(
            classpath,
            kwargs,
            import_paths=settings.import_paths,
            environment=environment,
            run_as=run_as,
            others=[
                OtherTrigger(one.name, one.classpath, store.inspect.trigger_kwargs(one.trigger_id))
                for one in store.inspect.watchers()[:OTHERS_MAX]
                # No module is imported that could be slow, or fail, and is not asked for.
                if one.name != name and (one.classpath == classpath or one.classpath.startswith("headgate.brokers."))
            ],
        )
    except (OSError, ValueError) as exc:
        raise CommandError(f"the class cannot be tried: {exc}; --no-check goes on without it") from exc
    if checked.problem:
        problem = checked.problem if checked.problem.endswith("?") else f"{checked.problem}."
        raise CommandError(
            f"{problem} Nothing was changed; --no-check leaves out this check, for example if only other machines have "
            "the class"
        )
    for note in checked.notes:
        print(f"headgate: {note}: the first one to start decides for all, so give them the same", file=sys.stderr)


def parse_kwargs(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a text of JSON with tagged values. Raises `CommandError`."""
    kwargs = json_object(text, "--kwargs")
    for name in kwargs:
        if not name.isidentifier():
            raise CommandError(f"--kwargs: {name!r} cannot be the name of an argument", exit_code=2)
    return kwargs
