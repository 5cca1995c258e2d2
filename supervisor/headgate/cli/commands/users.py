"""``headgate users``: who may log in to the pages, and as what."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, WideOption, print_structs
from headgate.scheduling.words import counted

if TYPE_CHECKING:
    from headgate.store.access.audit import Role

app = typer.Typer(help="Users of the pages: their roles, passwords and sessions.", no_args_is_help=True)


class RoleName(StrEnum):
    """A role: each may do what those before may."""

    viewer = "viewer"
    operator = "operator"
    admin = "admin"


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.")]
ROLE_HELP = "viewer sees all but payloads; operator also clears, marks, pauses, redrives; admin does everything."


def _role(role: RoleName) -> Role:
    names: dict[RoleName, Role] = {
        RoleName.viewer: "viewer",
        RoleName.operator: "operator",
        RoleName.admin: "admin",
    }
    return names[role]


@app.command("list")
def list_users(ctx: typer.Context, wide: WideOption = False, as_json: JsonOption = False) -> None:
    """List the users, how many browsers are logged in as each, and when one of these was used last."""
    with invocation(ctx).store() as store:
        print_structs(
            store.access.users(), ("name", "role", "created_date", "sessions", "used_at"), as_json=as_json, wide=wide
        )


@app.command()
def add(
    ctx: typer.Context, name: NameArgument, role: Annotated[RoleName, typer.Option(metavar="ROLE", help=ROLE_HELP)]
) -> None:
    """Add a user, and print a password; it is kept nowhere, so give it to the user now."""
    with invocation(ctx).store() as store:
        password = store.access.add_user(name, _role(role))
    print(f"added user {name}, {role.value}; the password is {password}")


@app.command("set")
def set_user(
    ctx: typer.Context,
    name: NameArgument,
    role: Annotated[RoleName | None, typer.Option(metavar="ROLE", help=ROLE_HELP)] = None,
    password: Annotated[
        bool, typer.Option("--password", help="Print another password; browsers have to log in again.")
    ] = False,
) -> None:
    """Give a user another role, which counts at once, or another password."""
    if role is None and not password:
        raise CommandError("nothing to change: give --role, --password, or both", exit_code=2)
    with invocation(ctx).store() as store:
        new = store.access.set_user(name, role=None if role is None else _role(role), makes_password=password)
    print(f"changed user {name}" + ("" if new is None else f"; the password is {new}"))


@app.command()
def remove(ctx: typer.Context, name: NameArgument) -> None:
    """Remove a user; what the audit says of the user stays."""
    with invocation(ctx).store() as store:
        store.access.remove_user(name)
    print(f"removed user {name}")


@app.command()
def revoke(ctx: typer.Context, name: NameArgument) -> None:
    """End all sessions of a user, or with `local` those by links: browsers have to log in again."""
    with invocation(ctx).store() as store:
        ended = store.access.revoke_sessions(name)
    print(f"ended {counted(ended, 'session')} of {name}")
