"""``headgate variables|connections|pools``: values that tasks and triggers read, and slots that tasks share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError, invocation, standard_input
from headgate.cli.lists import JsonOption, print_record, print_structs
from headgate.protocol.uris import masked_uri, parse_uri
from headgate.scheduling.words import counted

if TYPE_CHECKING:
    from headgate.store.tasks.values import ValueVerbs

variables_app = typer.Typer(help="Variables that tasks and triggers read, encrypted.", no_args_is_help=True)
connections_app = typer.Typer(help="Connections that tasks and triggers read, encrypted.", no_args_is_help=True)
pools_app = typer.Typer(help="Pools: how many tasks of a kind may run at the same time.", no_args_is_help=True)

MASK = "***"
_SHOWN = ("name", "updated_at", "description")
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
DescriptionOption = Annotated[str, typer.Option(metavar="TEXT", help="Its purpose, for lists.")]


# --- variables -----------------------------------------------------------------------------------


@variables_app.command("set")
def set_variable(
    ctx: typer.Context,
    name: NameArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="`-`: read it from standard input.")],
    description: DescriptionOption = "",
) -> None:
    """Store a variable; one of the same name is replaced."""
    with invocation(ctx).store() as store:
        store.tasks.variables.put(name, _value(value), description=description)
    print(f"set variable {name}")


@variables_app.command("get")
def get_variable(ctx: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Print the value of a variable."""
    with invocation(ctx).store() as store:
        value = _stored(store.tasks.variables, name, "variable")
    if as_json:
        print_record({"name": name, "value": value}, as_json=True)
    else:
        print(value)


@variables_app.command("list")
def list_variables(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the variables by name, without their values."""
    with invocation(ctx).store() as store:
        print_structs(store.tasks.variables.listed(), _SHOWN, as_json=as_json)


@variables_app.command("delete")
def delete_variable(ctx: typer.Context, name: NameArgument) -> None:
    """Delete a variable."""
    with invocation(ctx).store() as store:
        store.tasks.variables.remove(name)
    print(f"deleted variable {name}")


# --- connections ---------------------------------------------------------------------------------


@connections_app.command("set")
def set_connection(
    ctx: typer.Context,
    name: NameArgument,
    uri: Annotated[
        str,
        typer.Argument(metavar="URI", help="SCHEME://LOGIN:PASSWORD@HOST:PORT/SCHEMA?NAME=VALUE; `-`: standard input."),
    ],
    description: DescriptionOption = "",
) -> None:
    """Store a connection; one of the same name is replaced."""
    value = _value(uri)
    _check_uri(value.decode(), name)
    with invocation(ctx).store() as store:
        store.tasks.connections.put(name, value, description=description)
    print(f"set connection {name}")


@connections_app.command("get")
def get_connection(
    ctx: typer.Context,
    name: NameArgument,
    reveal: Annotated[bool, typer.Option("--reveal", help="With its password and its extra values.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the URI of a connection, its password and extra values masked, and a login alone, which may be a token."""
    with invocation(ctx).store() as store:
        uri = _stored(store.tasks.connections, name, "connection")
    shown = uri if reveal else masked_uri(uri, MASK)
    if as_json:
        print_record({"name": name, "uri": shown}, as_json=True)
    else:
        print(shown)


@connections_app.command("list")
def list_connections(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the connections by name, without their URIs."""
    with invocation(ctx).store() as store:
        print_structs(store.tasks.connections.listed(), _SHOWN, as_json=as_json)


@connections_app.command("delete")
def delete_connection(ctx: typer.Context, name: NameArgument) -> None:
    """Delete a connection."""
    with invocation(ctx).store() as store:
        store.tasks.connections.remove(name)
    print(f"deleted connection {name}")


def _check_uri(uri: str, name: str) -> None:
    try:
        parse_uri(uri)
    except ValueError as error:  # its text shows no part of the URI
        raise CommandError(f"the connection {name} cannot be read: {error}", exit_code=2) from None


def _value(text: str) -> bytes:
    if text != "-":
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise CommandError("the value is not text in UTF-8", exit_code=2) from None
    from headgate.store.tasks.values import VALUE_BYTES_MAX

    # One byte and a line end more than may be stored: enough for the store to see that it is too long.
    data = standard_input().buffer.read(VALUE_BYTES_MAX + 2)
    data = data.removesuffix(b"\n")
    try:
        data.decode()
    except UnicodeDecodeError as exc:
        raise CommandError("standard input is not text in UTF-8", exit_code=2) from exc
    return data


def _stored(verbs: ValueVerbs, name: str, kind: str) -> str:
    from headgate.store.errors import BadKey

    try:
        value = verbs.get(name)
    except BadKey:
        problem = f"the {kind} {name!r} was encrypted with a key that is not among the keys used here"
        raise CommandError(
            f"{problem}: see fernet_keys in `headgate config show`, or fernet.key in HEADGATE_HOME"
        ) from None
    if value is None:
        from headgate.store.errors import NoSuchRow

        names = [one.name for one in verbs.listed()]
        raise NoSuchRow(kind, name, near=_near(name, names))
    return value.decode("utf-8", "backslashreplace")


def _near(name: str, names: list[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, names, n=3)


# --- pools ---------------------------------------------------------------------------------------


@pools_app.command("list")
def list_pools(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the pools: their slots, the slots in use and by how many tasks, and the tasks that wait."""
    with invocation(ctx).store() as store:
        print_structs(store.inspect.pools(), ("name", "slots", "used", "tasks", "waiting"), as_json=as_json)


@pools_app.command("set")
def set_pool(
    ctx: typer.Context,
    name: NameArgument,
    slots: Annotated[int, typer.Argument(metavar="SLOTS", help="How many; with 0 no task starts.")],
) -> None:
    """Make a pool, or change its number of slots; tasks that run are not ended."""
    with invocation(ctx).store() as store:
        store.tasks.set_pool(name, slots)
    print(f"the pool {name} has {counted(slots, 'slot')}")
    if slots == 0:
        whose = "every task that names no pool" if name == "default_pool" else "its tasks"
        print(f"with 0 slots none of its tasks starts: this stops {whose}", file=sys.stderr)


@pools_app.command("delete")
def delete_pool(ctx: typer.Context, name: NameArgument) -> None:
    """Delete a pool. No unfinished task may be in it."""
    with invocation(ctx).store() as store:
        store.tasks.delete_pool(name)
    print(f"deleted pool {name}")
