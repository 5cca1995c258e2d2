"""The one table of all routes: the application is built from it, and tests walk through it.

A role is the least one that may see the page, or do what its form asks for. What nobody but an operator may see of a
page that viewers see, payloads above all, the page leaves out.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.store.access.audit import Action, Role
from headgate.web.acts import ACTS, act_path
from headgate.web.pages import (
    account,
    acting,
    audit,
    consumers,
    dags,
    events,
    machines,
    overview,
    pictures,
    runs,
    searching,
    signals,
    tasks,
    triggers,
    values,
)
from headgate.web.views import Handler


class Route(msgspec.Struct, frozen=True):
    """One route. ``path`` is as Starlette takes it.

    ``is_list``: its function returns a `Listing`, which is also at ``path`` + ``.json``. ``nav`` is the heading under
    which the menu has it, and ``title`` its words there; "": it is not in the menu. ``reads``: it is given queries.
    ``action``: what it does, in a store that is opened for it; there is no such route where nobody may do anything.
    """

    path: str
    handler: Handler
    role: Role = "viewer"
    method: Literal["GET", "POST"] = "GET"
    is_list: bool = False
    nav: str = ""
    title: str = ""
    reads: bool = True
    action: Action | None = None


ROUTES: tuple[Route, ...] = (
    Route("/", overview.overview, nav="Now", title="Overview"),
    Route("/streams", triggers.streams, is_list=True, nav="Events", title="Streams"),
    Route("/streams/{id}", triggers.stream),
    Route("/watchers", triggers.watchers, is_list=True, nav="Events", title="Watchers"),
    Route("/triggers", triggers.listing, is_list=True, nav="Events", title="Triggers"),
    Route("/triggers/{id}", triggers.one),
    Route("/events", events.listing, is_list=True, nav="Events", title="Events"),
    Route("/events/{id}", events.one),
    Route("/dead-letters", events.letters, is_list=True, nav="Events", title="Dead letters"),
    Route("/dead-letters/{id}", events.letter),
    Route("/assets", signals.assets, is_list=True, nav="Events", title="Assets"),
    Route("/assets/{id}", signals.asset),
    Route("/consumers", consumers.listing, is_list=True, nav="Events", title="Consumers"),
    Route("/consumers/{name}", consumers.letters, is_list=True),
    Route("/signals", signals.signals, is_list=True, nav="Events", title="Signals"),
    Route("/signals/{id}", signals.signal, role="operator"),
    Route("/dags", dags.listing, is_list=True, nav="Tasks", title="DAGs"),
    Route("/dags/{dag}", pictures.grid),
    Route("/dags/{dag}/graph", pictures.graph),
    # The name of a run may have slashes, which our links quote. If a proxy has unquoted them, a run takes all that no
    # route before it has taken.
    Route("/dags/{dag}/runs/{run:path}/tasks/{task}/log", tasks.log, role="operator", is_list=True),
    Route("/dags/{dag}/runs/{run:path}/tasks/{task}/instances", tasks.instances, is_list=True),
    Route("/dags/{dag}/runs/{run:path}/tasks/{task}", tasks.task),
    Route("/dags/{dag}/runs/{run:path}", tasks.run),
    Route("/runs", runs.listing, is_list=True, nav="Tasks", title="Runs"),
    Route("/pools", machines.pools, is_list=True, nav="Tasks", title="Pools"),
    Route("/variables", values.variables, is_list=True, nav="Tasks", title="Variables"),
    Route("/connections", values.connections, is_list=True, nav="Tasks", title="Connections"),
    Route("/supervisors", machines.supervisors, is_list=True, nav="Machines", title="Supervisors"),
    Route("/search", searching.search, is_list=True),
    Route("/audit", audit.listing, role="operator", is_list=True, nav="Machines", title="Audit"),
    Route("/help", machines.manual, nav="Machines", title="Help", reads=False),
    # --- who one is ---
    Route("/login", account.login, role="nobody", reads=False),
    Route("/login", account.log_in, role="nobody", method="POST", reads=False),
    Route("/login/link", account.print_link, role="nobody", method="POST", reads=False),
    Route("/logout", account.logout, method="POST", reads=False),
    Route("/account", account.account),
    Route("/account/password", account.change_password, method="POST", action="users set"),
    Route("/account/sessions", account.end_sessions, method="POST", action="users revoke"),
    # --- what one does ---
    *(
        Route(act_path(action), acting.HANDLERS[action], role=role, method="POST", action=action)
        for action, role in ACTS.items()
    ),
)
