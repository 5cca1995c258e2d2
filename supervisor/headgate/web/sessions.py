"""Who may see the pages: whoever has opened a link that this process has printed, and users by their passwords.

Links are in the memory of this process. Sessions are in the database, so that they outlive it; of a process that writes
nothing there they are in its memory, too. Only hashes of both are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headgate.store.access.audit import Actor, Role
from headgate.store.access.users import (
    LOCAL_NAME,
    SESSION_IDLE_S_MAX,
    SESSION_NOTED_S,
    SESSION_S_MAX,
    LoggedIn,
    User,
    digest_of,
)
from headgate.store.errors import DatabaseAway
from headgate.web.stores import Stores
from headgate.web.writing import Writer

LINK_S_MAX = 60.0  # a link that was printed can be opened for so long, once
LINKS_MAX = 8  # that can be opened at a time; the oldest goes first
LINK_PAUSE_S = 5.0  # between two links that a browser asks for
SESSIONS_MAX = 100  # in memory; the one that was idle for longest goes first
TOKEN_BYTES = 32
Clock = Callable[[], float]


class Links:
    """The open links of one process. May be used by several threads."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[str, float] = {}  # hash: when it ends
        self._printed_at = float("-inf")

    def new(self) -> str:
        """Return the token of a new link."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            self._links[digest_of(token)] = self._clock() + LINK_S_MAX
            while len(self._links) > LINKS_MAX:
                del self._links[next(iter(self._links))]
        return token

    def asked(self) -> str | None:
        """Return the token of a link that a browser has asked for; None if one was made a moment ago."""
        with self._lock:
            now = self._clock()
            if now < self._printed_at + LINK_PAUSE_S:
                return None
            self._printed_at = now
        return self.new()

    def use(self, token: str) -> bool:
        """Use up a link; return whether it was valid."""
        with self._lock:
            ends_at = self._links.pop(digest_of(token), None)
            return ends_at is not None and self._clock() <= ends_at


class Sessions(Protocol):
    """The open sessions. May be used by several threads. Each may raise the errors of a store."""

    def begin_local(self, address: str) -> str:
        """Begin a session for whoever has opened a link; return its token."""
        ...

    def log_in(self, name: str, password: str, address: str, browser: str) -> LoggedIn | None:
        """Begin a session of a user; None if this is not the password, or it is too early to try."""
        ...

    def named(self, name: str) -> User | None:
        """Return the user whom a proxy names; None if there is none of this name."""
        ...

    def find(self, token: str) -> User | None:
        """Return the user of an open session, which counts as used now; None if it is not open."""
        ...

    def end(self, token: str) -> None:
        """Log out."""
        ...


class MemorySessions:
    """Sessions of a process that writes nothing to the database: they are for links alone, and end with it."""

    def __init__(self, role: Role = "admin", clock: Clock = time.monotonic) -> None:
        self._user = User(LOCAL_NAME, role, is_local=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[float, float]] = {}  # hash: when it began, when it was used last

    def begin_local(self, address: str) -> str:
        """Begin a session for whoever has opened a link; return its token."""
        with self._lock:
            now = self._clock()
            session = secrets.token_urlsafe(TOKEN_BYTES)
            self._sessions[digest_of(session)] = (now, now)
            while len(self._sessions) > SESSIONS_MAX:
                del self._sessions[min(self._sessions, key=lambda one: self._sessions[one][1])]
            return session

    def log_in(self, name: str, password: str, address: str, browser: str) -> LoggedIn | None:
        """Return None: attempts could not be counted."""
        return None

    def named(self, name: str) -> User | None:
        """Return None: the roles of users are in the database, which this does not read for them."""
        return None

    def find(self, token: str) -> User | None:
        """Return the user of an open session, which counts as used now; None if it is not open."""
        name = digest_of(token)
        with self._lock:
            now = self._clock()
            found = self._sessions.get(name)
            if found is None:
                return None
            began, used = found
            if now - used > SESSION_IDLE_S_MAX or now - began > SESSION_S_MAX:
                del self._sessions[name]
                return None
            self._sessions[name] = (began, now)
            return self._user

    def end(self, token: str) -> None:
        """Log out."""
        with self._lock:
            self._sessions.pop(digest_of(token), None)


class StoredSessions:
    """Sessions in the database."""

    def __init__(self, stores: Stores, writer: Writer, role: Role = "admin") -> None:
        self._stores = stores
        self._writer = writer
        self._role: Role = role

    def begin_local(self, address: str) -> str:
        """Begin a session for whoever has opened a link; return its token."""
        with self._writer.store(Actor(LOCAL_NAME, self._role, "web", address)) as store:
            return store.access.begin_local_session(LOCAL_NAME, self._role, address)

    def log_in(self, name: str, password: str, address: str, browser: str) -> LoggedIn | None:
        """Begin a session of a user; None if this is not the password, or it is too early to try."""
        with self._writer.store(Actor(name, "nobody", "web", address)) as store:
            return store.access.log_in(name, password, address, browser)

    def named(self, name: str) -> User | None:
        """Return the user whom a proxy names, with the role of now; None if there is none of this name."""
        with self._stores.one() as store:
            return store.access.named(name)

    def find(self, token: str) -> User | None:
        """Return the user of an open session, which counts as used now; None if it is not open."""
        if not token:
            return None
        with self._stores.one() as store:
            found = store.access.session(token)
        if found is None:
            return None
        user, noted_s_ago = found
        if noted_s_ago > SESSION_NOTED_S:
            # The page is shown all the same: others may keep those that write busy, some without a login.
            with suppress(DatabaseAway), self._writer.store(None, wait_s=0) as store:
                store.access.note_use(token)
        return user

    def end(self, token: str) -> None:
        """Log out."""
        with self._writer.store(None) as store:
            store.access.end_session(token)


def form_token(session: str) -> str:
    """Return what each form of a session has to send back: nobody knows it who does not know the session."""
    return hmac.new(session.encode("utf-8", "surrogatepass"), b"form", hashlib.sha256).hexdigest()


def is_form_token(session: str, given: str) -> bool:
    """Whether a form was made for this session."""
    return hmac.compare_digest(form_token(session).encode(), given.encode("utf-8", "surrogatepass"))
