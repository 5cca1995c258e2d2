"""``headgate web``: the pages."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation

if TYPE_CHECKING:
    from headgate.supervisor.config import Settings
    from headgate.supervisor.metrics.address import Address
    from headgate.web.senders import Front
    from headgate.web.stores import Stores

END_S_MAX = 5.0  # requests may end within 3 s


def _end_with_stdin() -> None:
    """End this process when its parent does, which holds the other end of its standard input."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S_MAX)
    os._exit(1)


def _front(settings: Settings, address: Address) -> Front:
    """Return what the settings say of that which stands before the pages."""
    from headgate.supervisor.metrics.address import parse_network
    from headgate.web.senders import Front

    return Front(
        hosts=frozenset(host.lower() for host in settings.web_hosts),
        proxies=tuple(map(parse_network, settings.web_trusted_proxies)),
        user_header=settings.web_user_header,
        needs_tls=not (address.is_loopback or settings.web_plain_http),
        has_links=address.is_loopback,
    )


def _has_users(stores: Stores) -> bool:
    with stores.one() as store:
        return store.access.has_users()


def web(
    ctx: typer.Context,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Serve them at this address (docs/web.md has others)."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Nobody can do anything on them, and nothing is written.")
    ] = False,
    with_stdin: Annotated[bool, typer.Option("--with-stdin", hidden=True, help="End with standard input.")] = False,
) -> None:
    """Serve pages that show everything, with forms for what their users may do, until SIGTERM or Ctrl-C.

    It prints a link to log in with, which can be opened once, within a minute. It needs the extra `web` of the package
    (docs/web.md), and neither users' code nor the encryption keys: it may run as another user, or on another machine.
    """
    if with_stdin:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    call = invocation(ctx)
    settings = call.settings(web_listen=listen)
    if settings.hide_memory:  # users' code may run as the same user, and this has the database's URL and all sessions
        from headgate.supervisor.children.isolation import hide_memory

        hide_memory()
    try:
        from headgate.web import server
    except ImportError as error:
        raise CommandError(f'this needs an extra: pip install "headgate[web]" ({error})') from error
    from headgate.store.db.engine import database_name
    from headgate.supervisor.metrics.address import parse_address
    from headgate.web.sessions import MemorySessions, Sessions, StoredSessions
    from headgate.web.stores import Stores
    from headgate.web.views import Site
    from headgate.web.writing import Writer

    address = parse_address(settings.web_listen)
    front = _front(settings, address)
    if read_only and not address.is_loopback:
        raise CommandError(
            "--read-only has no users, so it serves this machine alone: give 127.0.0.1:PORT", exit_code=2
        )

    def tell(url: str) -> None:
        print(f"log in here, once, within a minute: {url}", flush=True)

    with ExitStack() as opened:
        opened.enter_context(call.engine())  # which refuses a database that is not there, or of another version
        stores = Stores(settings.database_url)
        opened.callback(stores.close)
        try:
            server.check_address(address, front, is_plain=settings.web_plain_http, has_users=lambda: _has_users(stores))
            listener = opened.enter_context(server.listen(address))
        except server.ServerRefused as refused:
            raise CommandError(str(refused), exit_code=2) from refused
        writer = None if read_only else Writer(settings.database_url)
        sessions: Sessions = MemorySessions() if writer is None else StoredSessions(stores, writer)
        site = Site(
            stores=stores,
            liveness=liveness_here(settings.lease_silence_max_s),
            sessions=sessions,
            writer=writer,
            database=database_name(stores.engine),
            log_folder=settings.log_folder,
            port=listener.getsockname()[1],
            print_link=lambda token: tell(server.url_of(listener, token)),
            front=front,
        )
        server.serve(site, listener, tell=tell)
