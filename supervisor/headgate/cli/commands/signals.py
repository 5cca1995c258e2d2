"""``headgate signals``: values under keys, sent by tasks, triggers, programs and users."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.invocation import CommandError, invocation, user_name
from headgate.cli.lists import (
    ROWS_LISTED,
    AllOption,
    JsonOption,
    RowsOption,
    WideOption,
    print_json_lines,
    print_pages,
    print_record,
)
from headgate.cli.options import json_value
from headgate.cli.output import json_line, payload
from headgate.cli.tables import Column, cell, fields, print_table
from headgate.presentation.moments import exact
from headgate.protocol.messages.signals import (
    AUTOMATIC,
    DEFAULT_NAMESPACE,
    SIGNAL_BYTES_MAX,
    SIGNALS_PER_PAGE_MAX,
    VERSION_MAX,
    SignalSend,
)
from headgate.protocol.values import encode_value
from headgate.scheduling.words import counted

if TYPE_CHECKING:
    from headgate.store.signals.reading import Signal

app = typer.Typer(help="Signals: values under keys, each with the next version of its key.", no_args_is_help=True)

TOKEN_VARIABLE = "HEADGATE_SIGNALS_TOKEN"

# Other programs read these; fields may be added at the end, never renamed.
SIGNAL_COLUMNS = ("namespace", "key", "version", "value", "sender", "sent_at", "dedup", "dag", "run_id")
_SHOWN = ("version", "value", "sent_at", "sender", "dag", "run_id")
_KEYS_SHOWN: tuple[Column, ...] = ("namespace", "key", ("versions", lambda key: key.last_version), "sent_at")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
NamespaceOption = Annotated[str, typer.Option(metavar="NS", help="The namespace of the key.")]
AfterOption = Annotated[
    int | None, typer.Option(metavar="VERSION", min=0, max=VERSION_MAX, help="Only later versions.")
]


@app.command()
def send(
    ctx: typer.Context,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="[JSON]", help="The value; null if it is left out.")] = "null",
    dedup: Annotated[
        str | None, typer.Option(metavar="NAME", help="Send nothing if the key has a version of this name.")
    ] = None,
    run: Annotated[
        tuple[str, str] | None, typer.Option(metavar="DAG RUN", help="For this run alone: a run_id, or `latest`.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(metavar="DAG", help="Start a run of this DAG with it, unless one is open.")
    ] = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Send a signal: it gets the next version of its key."""
    from headgate.client.signals import automatic_dedup
    from headgate.store.signals.sending import NewSignal

    if run is not None and start is not None:
        raise CommandError("--start goes without --run: a run that is new has no name yet", exit_code=2)
    data = encode_value(json_value(value, "JSON"), where="value", bytes_max=SIGNAL_BYTES_MAX)
    with invocation(ctx).store() as store:
        of_run = None if run is None else store.inspect.run(*run).line
        dag_run = None if of_run is None else of_run.id
        said = SignalSend(key, data, automatic_dedup() if dedup is None else dedup, namespace, run is not None)
        new, started = NewSignal.of(said, f"command of {user_name()}", dag_run), None
        is_paused = start is not None and store.inspect.dag(start)[0].is_paused
        if start is None:
            (sent,) = store.signals.send([new])
        else:
            (sent,), started = store.signals.send_and_start([new], start)
    record = {"namespace": namespace, "key": key, "version": sent.version, "is_new": sent.is_new}
    if as_json:
        print_record(record | ({} if start is None else {"run_id": started}), as_json=True)
    elif sent.is_new:
        print(f"sent version {sent.version} of {key}")
        if start is not None:
            print(f"a run of {start} is open already" if started is None else f"created run {started} of {start}")
        if is_paused and started is not None:
            print(f"the DAG is paused: the run waits for `headgate dags unpause {start}`")
        if of_run is not None and of_run.ended_at is not None:
            print(f"run {of_run.run_id} of {of_run.dag} has ended ({of_run.state}): nothing in it waits for the signal")
    else:
        print(f"version {sent.version} of {key} was sent under the same name before: nothing is sent")


@app.command("list")
def list_signals(
    ctx: typer.Context,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="The versions of this key.")] = None,
    after: AfterOption = None,
    newest: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=SIGNALS_PER_PAGE_MAX, help="The newest N versions.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NS", help="The namespace of the key.")] = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a key that are kept, the oldest first; without a key, the keys."""
    from headgate.store.signals.reading import KeyRow

    if newest is not None and (after is not None or everything or limit != ROWS_LISTED):
        raise CommandError("--newest goes with none of --after, --limit and --all", exit_code=2)
    if key is None and (after, newest) != (None, None):
        raise CommandError("--after and --newest are for the versions of one key: name it", exit_code=2)
    with invocation(ctx).store() as store:
        if key is None:
            page = partial(store.signals.keys, namespace)
            print_pages(page, KeyRow, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_KEYS_SHOWN)
            return
        of = (key, namespace or DEFAULT_NAMESPACE)
        store.signals.key(*of)
        if newest is not None:
            found: Iterable[Signal] = store.signals.newest(*of, limit=newest)
        else:
            found = _versions(store, *of, after=after or 0, limit=None if everything else limit)
        if as_json:
            print_json_lines(map(_record, found))
        else:
            print_table(map(_text_record, found), SIGNAL_COLUMNS if wide else _SHOWN, wide=wide)


def _versions(store: Any, key: str, namespace: str, *, after: int, limit: int | None) -> Iterable[Signal]:
    left = limit
    while left is None or left > 0:
        size = SIGNALS_PER_PAGE_MAX if left is None else min(left, SIGNALS_PER_PAGE_MAX)
        page = store.signals.page(key, namespace, after=after, limit=size)
        yield from page.signals
        if page.is_empty:
            return
        after = page.signals[-1].version
        left = None if left is None else left - len(page.signals)


@app.command()
def listen(
    ctx: typer.Context,
    key: KeyArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with those to come, until Ctrl-C.")] = False,
    after: AfterOption = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Wait for the next version no longer than this.")
    ] = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Wait for the next version of a key, or one after a version, and print it; with --follow all that come.

    The exit code is 1 if none came in time.
    """
    from headgate.client import Client

    count = 0
    with invocation(ctx).store() as store:
        client = Client(store.database)
        for found in client.listen_signal(key, after=after, namespace=namespace, idle_s=timeout):
            _print_now(found, as_json=as_json)
            count += 1
            if not follow:
                return
    if not count:
        raise CommandError(f"no version of {key} came within {timeout:g} s")


@app.command()
def show(
    ctx: typer.Context, key: KeyArgument, namespace: NamespaceOption = DEFAULT_NAMESPACE, as_json: JsonOption = False
) -> None:
    """Show a key: how many versions were sent, the newest of them, and which tasks wait for the next."""
    with invocation(ctx).store() as store:
        row = store.signals.key(key, namespace)
        newest = store.signals.newest(key, namespace)
        waiting = store.signals.waiting(key, namespace, limit=ROWS_LISTED)
    record = {
        "namespace": row.namespace,
        "key": row.key,
        "versions": row.last_version,
        "created_date": row.created_date,
    }
    of_newest = _record if as_json else _text_record
    last = of_newest(newest[-1]) if newest else {}
    record |= {name: last.get(name) for name in ("value", "sender", "sent_at", "dedup", "dag", "run_id")}
    if as_json:
        print_record(record | {"waiting": [fields(task, task.__struct_fields__) for task in waiting]}, as_json=True)
        return
    print_record(record, as_json=False)
    if waiting:
        print()
        columns = ("dag", "run_id", "task_id", "seen_version", "has_rule")
        asked = ("is_asked", "error") if any(task.is_asked or task.error for task in waiting) else ()
        print_table(waiting, (*columns, *asked))


@app.command()
def forget(ctx: typer.Context, key: KeyArgument, namespace: NamespaceOption = DEFAULT_NAMESPACE) -> None:
    """Delete a key that is not needed any more, with all its versions. They begin with 1 if it is used again."""
    with invocation(ctx).store() as store:
        kept = store.signals.forget(key, namespace)
    print(f"forgot {key} with {counted(kept, 'version')}")


@app.command()
def serve(
    ctx: typer.Context,
    address: Annotated[str, typer.Option("--grpc", metavar="HOST:PORT", help="Answer here; port 0: any that is free.")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"The token that callers need; without this, ${TOKEN_VARIABLE}.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificates for TLS, as PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of the certificate, as PEM.")] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Answer everybody; for an address of this machine only.")
    ] = False,
    plaintext: Annotated[
        bool,
        typer.Option("--plaintext", help="Answer other machines without TLS, for example behind a proxy."),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Answer /metrics, /livez and /readyz here, over HTTP."),
    ] = None,
) -> None:
    """Send and hear signals for programs elsewhere, over gRPC, until SIGTERM.

    It needs the extra `grpc` of the package (docs/signals.md).
    """
    # gRPC's C code would write lines of its own between those of the log, one for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from headgate.signal_server import server
    except ImportError as error:
        raise CommandError(f'this needs an extra: pip install "headgate[grpc]" ({error})') from error
    from headgate.store.db.secrets import Secrets
    from headgate.store.db.transaction import Database

    _refuse_contradictions(
        {
            "--no-token": no_token,
            "--token-file": token_file is not None,
            TOKEN_VARIABLE: bool(os.environ.get(TOKEN_VARIABLE)),
            "--plaintext": plaintext,
            "--certificate": certificate is not None,
            "--key": key is not None,
        }
    )
    try:
        server.check_address(address, has_token=not no_token, is_encrypted=certificate is not None or plaintext)
        scraped_at = server.metrics_address(metrics)
        identity = server.read_identity(certificate, key)
        token = None if no_token else server.check_token(*_token(token_file))
        with invocation(ctx).engine() as engine:
            server.serve(
                Database(engine, Secrets.none(), None),
                address,
                token=token,
                identity=identity,
                metrics=scraped_at,
                tell=lambda at: print(f"serving signals on {at}", flush=True),
            )
    except server.ServerRefused as refused:
        raise CommandError(str(refused), exit_code=2) from refused


_CONTRADICTIONS = (
    ("--no-token", "--token-file", "callers need a token, or they do not"),
    ("--no-token", TOKEN_VARIABLE, "callers need a token, or they do not; unset the variable to answer everybody"),
    ("--plaintext", "--certificate", "the link is TLS, or it is not"),
    ("--plaintext", "--key", "the link is TLS, or it is not"),
)


def _refuse_contradictions(given: dict[str, bool]) -> None:
    """Raise `CommandError` if of two that exclude each other both are given: neither is followed silently."""
    for one, other, why in _CONTRADICTIONS:
        if given[one] and given[other]:
            raise CommandError(f"{one} goes without {other}: {why}", exit_code=2)


def _token(file: Path | None) -> tuple[str, str]:
    """Return the token, and where it is from."""
    if file is not None:
        return file.read_text(errors="replace"), str(file)
    if TOKEN_VARIABLE not in os.environ:
        raise CommandError(
            f"callers need a token: set {TOKEN_VARIABLE}, or give --token-file FILE, for example with the output of "
            f"`openssl rand -hex 32`; --no-token is for an address of this machine",
            exit_code=2,
        )
    return os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE


def _record(found: Signal) -> dict[str, Any]:
    return {name: payload(found.data) if name == "value" else getattr(found, name) for name in SIGNAL_COLUMNS}


def _text_record(found: Signal) -> dict[str, Any]:
    """Return a signal for people, its value as JSON: that tells a text from a number, and null from nothing.

    A dedup that the sender has not given means nothing to them.
    """
    record = _record(found)
    dedup = None if found.dedup.startswith(AUTOMATIC) else found.dedup
    return record | {"value": json_line(record["value"]), "dedup": dedup}


def _print_now(found: Signal, *, as_json: bool) -> None:
    if as_json:
        line = json_line(_record(found))
    else:
        line = "  ".join([exact(found.sent_at), str(found.version), cell(_text_record(found)["value"])])
    sys.stdout.write(line + "\n")
    sys.stdout.flush()  # each line when it comes, also into a pipe
