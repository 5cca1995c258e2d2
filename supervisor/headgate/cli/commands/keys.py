"""``headgate keys``: the keys that the database is written with."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import typer

from headgate.cli.invocation import BUSY_PAUSE_S, BUSY_ROUNDS_MAX, CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.tables import print_table

if TYPE_CHECKING:
    from headgate.store.store import Store

app = typer.Typer(
    help="The keys that encrypt kwargs, variables and connections, by their fingerprints.", no_args_is_help=True
)

_COLUMNS = ("fingerprint", "state", "here", "created_date")
_ROTATIONS_MAX = 10  # that others may begin while one is being finished


@app.command("list")
def list_keys(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the keys of the database, and those that only this machine has. The keys themselves are never shown.

    `primary` encrypts. `superseded` may still be needed to decrypt: a rotation is not finished. Nothing is encrypted
    with a `retired` one, except in backups. `unused` is on this machine only.
    """
    from headgate.store.db.secrets import Secrets
    from headgate.store.errors import NoKeyFile
    from headgate.store.keys import known_keys

    call = invocation(ctx)
    settings = call.settings()
    here: list[str] = []
    with contextlib.suppress(NoKeyFile):
        here = Secrets.open(settings.home, settings.fernet_keys).fingerprints
    with call.engine() as engine:
        known = known_keys(engine)
    rows: list[dict[str, object]] = []
    for key in known:
        state = "primary" if key.superseded_at is None else "superseded" if key.retired_at is None else "retired"
        created = key.created_date
        rows.append(dict(zip(_COLUMNS, (key.fingerprint, state, key.fingerprint in here, created), strict=True)))
    for fingerprint in here:
        if fingerprint not in {key.fingerprint for key in known}:
            rows.append(dict(zip(_COLUMNS, (fingerprint, "unused", True, None), strict=True)))
    if as_json:
        print_json_lines(rows)
    else:
        print_table(rows, _COLUMNS)


@app.command()
def add(ctx: typer.Context) -> None:
    """Put a new key into the key file of this machine, for the next rotation: copy the file to all other machines."""
    with invocation(ctx).store() as store:
        fingerprint = store.keys.add()
        path = store.database.secrets.path
    print(f"added the key {fingerprint} to {path}: copy the file to all machines, then run `headgate keys rotate`")


@app.command()
def rotate(ctx: typer.Context) -> None:
    """Make another key the primary one, and encrypt everything again with it. Supervisors may run on.

    The other key is one that this machine has and the database does not know yet; with supervisors on one machine only,
    a new one is put into its key file. If it is interrupted, run it again: it goes on where it was.
    """
    from headgate.store.errors import UnusableKey

    call = invocation(ctx)
    silence_max_s = call.settings().lease_silence_max_s
    with call.store() as store:
        elsewhere = _supervisors_elsewhere(store, silence_max_s)
        try:
            primary = store.keys.begin_rotation(makes_key=not elsewhere)
        except UnusableKey as error:
            if not elsewhere:
                raise
            raise CommandError(
                f"{error}, and a supervisor runs on {', '.join(elsewhere)}: run `headgate keys add`, copy the key file "
                f"to all machines, and run this again"
            ) from None
        rewritten = unreadable = 0
        for _ in range(_ROTATIONS_MAX):
            rewritten_now, unreadable = _encrypt_all_again(store)
            rewritten += rewritten_now
            retired = store.keys.retire(primary)
            if retired is not None:
                break
            primary = store.keys.begin_rotation(makes_key=False)
        else:
            raise CommandError("others begin rotations all the time: run this again")
    print(f"the key {primary} is the primary one; {rewritten:,} values are encrypted again")
    if unreadable:
        print(f"{unreadable:,} values cannot be decrypted with any of the keys, and stay as they are")
    if retired:
        print(f"retired: {', '.join(retired)}. Nothing needs it any more, except backups that are older than this")


def _supervisors_elsewhere(store: Store, silence_max_s: float) -> list[str]:
    """Return the names of other machines on which supervisors seem to run: a new key has to be copied to them."""
    from headgate.supervisor.serve import machine_identity

    here = machine_identity()
    rows = store.live_triggerers()
    return sorted({row.hostname for row in rows if row.machine != here and row.heartbeat_age_s <= silence_max_s})


def _encrypt_all_again(store: Store) -> tuple[int, int]:
    """Encrypt every value under the primary key; return how many were rewritten, and how many no key decrypts."""
    from headgate.store.keys import ENCRYPTED

    rewritten = unreadable = 0
    for column in ENCRYPTED:
        for _ in range(BUSY_ROUNDS_MAX):
            left = unreadable_here = 0
            next_id: int | None = 0
            while next_id is not None:
                batch = store.keys.encrypt_again(column, next_id)
                rewritten += batch.rewritten
                left += batch.left
                unreadable_here += batch.unreadable
                next_id = batch.next_id
            if not left:
                break
            time.sleep(BUSY_PAUSE_S)  # a supervisor is changing these rows, which takes milliseconds
        else:
            raise CommandError(f"rows of {column} are being changed by others all the time: run this again")
        unreadable += unreadable_here
    return rewritten, unreadable
