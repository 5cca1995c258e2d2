"""Who may see the pages: whoever has opened a link that this process has printed.

Links and sessions are in the memory of this process, so that they end with it. Only hashes of them are kept.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable

LINK_S_MAX = 60.0  # a link that was printed can be opened for so long, once
LINKS_MAX = 8  # that can be opened at a time; the oldest goes first
LINK_PAUSE_S = 5.0  # between two links that a browser asks for
SESSION_IDLE_S_MAX = 12 * 3600.0
SESSION_S_MAX = 7 * 86_400.0
SESSIONS_MAX = 100  # the one that was idle for longest goes first
TOKEN_BYTES = 32


class Sessions:
    """The open links and sessions of one process. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[str, float] = {}  # hash: when it ends
        self._sessions: dict[str, tuple[float, float]] = {}  # hash: when it began, when it was used last
        self._printed_at = float("-inf")

    def new_link(self) -> str:
        """Return the token of a new link."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            self._links[_hash(token)] = self._clock() + LINK_S_MAX
            while len(self._links) > LINKS_MAX:
                del self._links[next(iter(self._links))]
        return token

    def asked_link(self) -> str | None:
        """Return the token of a link that a browser has asked for; None if one was made a moment ago."""
        with self._lock:
            now = self._clock()
            if now < self._printed_at + LINK_PAUSE_S:
                return None
            self._printed_at = now
        return self.new_link()

    def log_in(self, token: str) -> str | None:
        """Return the token of a new session for that of a link, which is used up; None if the link is not valid."""
        with self._lock:
            now = self._clock()
            ends_at = self._links.pop(_hash(token), None)
            if ends_at is None or now > ends_at:
                return None
            session = secrets.token_urlsafe(TOKEN_BYTES)
            self._sessions[_hash(session)] = (now, now)
            while len(self._sessions) > SESSIONS_MAX:
                del self._sessions[min(self._sessions, key=lambda one: self._sessions[one][1])]
            return session

    def is_open(self, session: str) -> bool:
        """Whether a session is open; it counts as used now."""
        name = _hash(session)
        with self._lock:
            now = self._clock()
            found = self._sessions.get(name)
            if found is None:
                return False
            began, used = found
            if now - used > SESSION_IDLE_S_MAX or now - began > SESSION_S_MAX:
                del self._sessions[name]
                return False
            self._sessions[name] = (began, now)
            return True

    def end(self, session: str) -> None:
        """Log out."""
        with self._lock:
            self._sessions.pop(_hash(session), None)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
