"""The one table of all routes: the application is built from it, and tests walk through it.

A role is the least one that may see the page. Until there are users, whoever has opened the link that was printed has
all of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.web.pages import (
    account,
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
)
from headgate.web.views import Handler

Role = Literal["nobody", "viewer", "operator", "admin"]


class Route(msgspec.Struct, frozen=True):
    """One route. ``path`` is as Starlette takes it.

    ``is_list``: its function returns a `Listing`, which is also at ``path`` + ``.json``. ``nav`` is the heading under
    which the menu has it, and ``title`` its words there; "": it is not in the menu. ``reads``: it is given a store.
    """

    path: str
    handler: Handler
    role: Role = "viewer"
    method: Literal["GET", "POST"] = "GET"
    is_list: bool = False
    nav: str = ""
    title: str = ""
    reads: bool = True


ROUTES: tuple[Route, ...] = (
    Route("/", overview.overview, nav="Now", title="Overview"),
    Route("/streams", triggers.streams, is_list=True, nav="Events", title="Streams"),
    Route("/streams/{id}", triggers.stream),
    Route("/watchers", triggers.watchers, is_list=True, nav="Events", title="Watchers"),
    Route("/triggers", triggers.listing, is_list=True, nav="Events", title="Triggers"),
    Route("/triggers/{id}", triggers.one),
    Route("/events", events.listing, is_list=True, nav="Events", title="Events"),
    Route("/events/{id}", events.one, role="operator"),
    Route("/dead-letters", events.letters, is_list=True, nav="Events", title="Dead letters"),
    Route("/dead-letters/{id}", events.letter, role="operator"),
    Route("/assets", signals.assets, is_list=True, nav="Events", title="Assets"),
    Route("/assets/{id}", signals.asset),
    Route("/signals", signals.signals, is_list=True, nav="Events", title="Signals"),
    Route("/signals/{id}", signals.signal, role="operator"),
    Route("/dags", dags.listing, is_list=True, nav="Tasks", title="DAGs"),
    Route("/dags/{dag}", pictures.grid),
    Route("/dags/{dag}/graph", pictures.graph),
    Route("/dags/{dag}/runs/{run}", tasks.run, role="operator"),
    Route("/dags/{dag}/runs/{run}/tasks/{task}", tasks.task, role="operator"),
    Route("/dags/{dag}/runs/{run}/tasks/{task}/log", tasks.log, role="operator", is_list=True),
    Route("/runs", runs.listing, is_list=True, nav="Tasks", title="Runs"),
    Route("/pools", machines.pools, is_list=True, nav="Tasks", title="Pools"),
    Route("/supervisors", machines.supervisors, is_list=True, nav="Machines", title="Supervisors"),
    Route("/search", searching.search, is_list=True),
    Route("/help", machines.manual, nav="Machines", title="Help", reads=False),
    # --- who one is ---
    Route("/login", account.login, role="nobody", reads=False),
    Route("/login/link", account.print_link, role="nobody", method="POST", reads=False),
    Route("/logout", account.logout, method="POST", reads=False),
)
