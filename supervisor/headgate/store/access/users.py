"""Users of the pages: their passwords, roles and sessions, and how fast somebody may guess.

A password is made here, shown once, and kept as its scrypt hash; of the token of a session only a hash is kept. Whoever
fails `GUESSES_FREE` times has to wait, twice as long after each further failure: for one user from one address, and
with more patience for all users from one address. An attempt is counted before its password is looked at, so many at
once are no way around that.

So that nobody locks a user out by guessing, a browser that the user has logged in with before is counted apart: it has
a token, which is good for nothing else, and waits for none but its own failures.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, update

from headgate.store.access.audit import Action, Role, Written
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import insert_into
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting, reading, writing
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.tables import web_browser, web_guess, web_session, web_user
from headgate.store.triggers.watchers import check_name

USER_CHARS_MAX = 100
PASSWORD_BYTES = 15  # 20 characters
PASSWORD_CHARS_MIN = 12  # of one that a user has chosen
PASSWORD_CHARS_MAX = 1000  # of one that is tried
SCRYPT: Final = {"n": 2**15, "r": 8, "p": 3, "maxmem": 64 * 1024 * 1024}
SALT_BYTES = 16
TOKEN_BYTES = 32
SESSION_IDLE_S_MAX = 12 * 3600.0
SESSION_S_MAX = 7 * 86_400.0
SESSION_NOTED_S = 60.0  # its use is written down no more often than this
SESSIONS_PER_USER_MAX = 100  # the one that was idle for longest goes first
GUESSES_FREE = 5  # failures of one user from one address, before somebody has to wait
GUESSES_OF_ADDRESS_FREE = 20  # of all users from one address
GUESS_WAIT_S_MAX = 900.0
GUESSES_KEPT_S = 86_400.0
BROWSER_KNOWN_S = 90 * 86_400.0  # since its last login
BROWSERS_PER_USER_MAX = 20  # the one that logged in longest ago goes first
LOCAL_NAME = "local"  # of whoever has opened a link that a process has printed
MACHINE_BITS = 64  # of an IPv6 address: those behind them a machine chooses as it likes
LOOPBACK = "127.0.0.1"  # stands for all addresses of this machine
EVERYONE = ""  # the user under which the failures of an address are counted
OF_NOBODY = f"scrypt${SCRYPT['n']}${SCRYPT['r']}${SCRYPT['p']}${'00' * SALT_BYTES}${'00' * 64}"  # of no password


class User(msgspec.Struct, frozen=True):
    """Somebody who is logged in.

    ``is_local``: by a link that the process has printed, not by a password; ``is_named``: by a proxy, which has no
    session here.
    """

    name: str
    role: Role
    is_local: bool = False
    is_named: bool = False


class UserRow(msgspec.Struct, frozen=True):
    """A user, with the number of sessions that are open, and when one of them was used last."""

    id: int
    name: str
    role: Role
    created_date: datetime
    sessions: int
    used_at: datetime | None


class SessionRow(msgspec.Struct, frozen=True):
    """An open session of a user: since when, when it was used last, and from which address it was begun."""

    id: int
    began_at: datetime
    used_at: datetime
    address: str
    is_this: bool


class LoggedIn(NamedTuple):
    """The tokens of a new session, and of the browser, which is known from now on."""

    session: str
    browser: str


class _Attempt(NamedTuple):
    is_allowed: bool
    password: str | None


class AccessVerbs(Verbs):
    """The verbs of users and sessions."""

    # --- users -----------------------------------------------------------------------------------

    def add_user(self, name: str, role: Role) -> str:
        """Add a user; return the password, which is kept nowhere. Raises `BadName` and `ValueRefused`."""
        check_name(name, "the name of a user", chars_max=USER_CHARS_MAX)
        if name == LOCAL_NAME:
            raise ValueRefused(f"the audit has {LOCAL_NAME!r} for whoever has opened a link: choose another name")
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        self._add_user(name, role, hashed(password))
        return password

    @acting
    def _add_user(self, tx: Tx, name: str, role: Role, password: str) -> None:
        new = insert_into(tx.connection, web_user).values(name=name, role=role, password=password, created_date=tx.now)
        if tx.connection.execute(new.on_conflict_do_nothing().returning(web_user.c.id)).first() is None:
            raise ValueRefused(f"there is a user {name!r} already; `headgate users set` changes it")
        tx.act("users add", f"user {name}", after={"role": role})

    def set_user(self, name: str, *, role: Role | None = None, makes_password: bool = False) -> str | None:
        """Give a user another role, another password, or both; return the new password.

        A new password ends the sessions of the user; a new role is that of the open ones, too. Raises `NoSuchRow`.
        """
        password = secrets.token_urlsafe(PASSWORD_BYTES) if makes_password else None
        self._set_user(name, role, None if password is None else hashed(password))
        return password

    @acting
    def _set_user(self, tx: Tx, name: str, role: Role | None, password: str | None) -> None:
        row = _locked(tx, name)
        values = {key: value for key, value in (("role", role), ("password", password)) if value is not None}
        if values:
            tx.connection.execute(update(web_user).where(web_user.c.id == row.id).values(**values))
        if password is not None:
            tx.connection.execute(delete(web_session).where(web_session.c.user_id == row.id))
        tx.act(
            "users set",
            f"user {name}",
            before={"role": row.role},
            after={"role": role or row.role, "has_new_password": password is not None},
            changed=bool(values),
        )

    @acting
    def remove_user(self, tx: Tx, name: str) -> None:
        """Delete a user with all sessions. Raises `NoSuchRow`."""
        row = _locked(tx, name)
        tx.connection.execute(delete(web_session).where(web_session.c.user_id == row.id))
        tx.connection.execute(delete(web_browser).where(web_browser.c.user_id == row.id))
        tx.connection.execute(delete(web_user).where(web_user.c.id == row.id))
        tx.act("users remove", f"user {name}", before={"role": row.role})

    @acting
    def revoke_sessions(self, tx: Tx, name: str) -> int:
        """End all sessions of a user, or with `LOCAL_NAME` those by links; return how many there were.

        Raises `NoSuchRow`.
        """
        of_links = web_session.c.user_id.is_(None)
        mine = of_links if name == LOCAL_NAME else web_session.c.user_id == _locked(tx, name).id
        ended = tx.connection.execute(delete(web_session).where(mine)).rowcount
        tx.act("users revoke", f"user {name}", after={"sessions": ended}, changed=ended > 0)
        return ended

    @reading
    def users(self, tx: Tx) -> list[UserRow]:
        """Return the users by name."""
        open_ones = (
            select(web_session.c.user_id, func.count().label("sessions"), func.max(web_session.c.used_at).label("used"))
            .where(_is_open(tx))
            .group_by(web_session.c.user_id)
            .subquery()
        )
        columns = (web_user.c.id, web_user.c.name, web_user.c.role, web_user.c.created_date)
        joined = web_user.outerjoin(open_ones, open_ones.c.user_id == web_user.c.id)
        found = select(*columns, func.coalesce(open_ones.c.sessions, 0), open_ones.c.used).select_from(joined)
        return [UserRow(*row) for row in tx.connection.execute(found.order_by(web_user.c.name))]

    @reading
    def has_users(self, tx: Tx) -> bool:
        """Whether there is any user."""
        return tx.connection.execute(select(web_user.c.id).limit(1)).first() is not None

    # --- logging in ------------------------------------------------------------------------------

    def log_in(self, name: str, password: str, address: str, browser: str = "") -> LoggedIn | None:
        """Begin a session of a user; None if this is not the password, or it is too early to try.

        ``browser``: the token that this browser was given by an earlier login; "": it has none.
        """
        known = self._right_password(name, password, address, browser, "users log in")
        return None if known is None else self._begin_session(name, address, known, browser)

    def change_password(self, name: str, password: str, new: str, address: str, browser: str, session: str) -> bool:
        """Give users another password who know their present one; return False if they do not, or have to wait.

        All other sessions of the user end. Raises `ValueRefused` if the new one is too short or too long.
        """
        if not PASSWORD_CHARS_MIN <= len(new) <= PASSWORD_CHARS_MAX:
            raise ValueRefused(f"a password has {PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX:,} characters")
        known = self._right_password(name, password, address, browser, "users set")
        if known is None:
            return False
        return self._change_password(name, address, known, browser, hashed(new), session)

    def _right_password(self, name: str, password: str, address: str, browser: str, action: Action) -> str | None:
        """Return the hash of a user's password if this is it, and it is not too early to try."""
        name, password = name[: USER_CHARS_MAX + 1], password[: PASSWORD_CHARS_MAX + 1]
        if not name:  # guesses are counted under `EVERYONE`
            return None
        attempt = self._begin_attempt(name, _place_of(address), browser)
        if not attempt.is_allowed:
            return None
        # The same work for a user that there is not, so that the time does not tell.
        is_right = is_password(password, attempt.password or OF_NOBODY)
        if attempt.password is None or not is_right:
            self._refuse(action, name)
            return None
        return attempt.password

    @acting
    def _begin_attempt(self, tx: Tx, name: str, address: str, browser: str) -> _Attempt:
        """Count an attempt, if it is not too early for one."""
        tx.act_nothing()
        old = tx.now - timedelta(seconds=GUESSES_KEPT_S)
        tx.connection.execute(delete(web_guess).where(web_guess.c.last_at < old))
        counted = _counted(tx, name, address, browser)
        for user, place, free in counted:
            new = insert_into(tx.connection, web_guess).values(user=user, address=place, failures=0, last_at=tx.now)
            # It locks the row in the same statement: another login may delete it between two.
            of_key = [web_guess.c.user, web_guess.c.address]
            locked = new.on_conflict_do_update(index_elements=of_key, set_={"failures": web_guess.c.failures})
            row = tx.connection.execute(locked.returning(web_guess.c.failures, web_guess.c.last_at)).one()
            if row.failures >= free and tx.now < row.last_at + timedelta(seconds=wait_s(row.failures - free)):
                return _Attempt(False, None)
        more = {"failures": web_guess.c.failures + 1, "last_at": tx.now}
        for user, place, _ in counted:
            is_it = (web_guess.c.user == user, web_guess.c.address == place)
            tx.connection.execute(update(web_guess).where(*is_it).values(more))
        found = select(web_user.c.password).where(web_user.c.name == name)
        return _Attempt(True, tx.connection.execute(found).scalar_one_or_none())

    @acting
    def _refuse(self, tx: Tx, action: Action, name: str) -> None:
        tx.act(action, f"user {name}", is_refused=True)

    @acting
    def _begin_session(self, tx: Tx, name: str, address: str, password: str, browser: str) -> LoggedIn | None:
        row = _still_with(tx, name, address, password, browser, "users log in")
        if row is None:
            return None
        tx.act("users log in", f"user {name}")
        return LoggedIn(_new_session(tx, address, user_id=row.id), _know_browser(tx, row.id, browser))

    @acting
    def _change_password(
        self, tx: Tx, name: str, address: str, password: str, browser: str, new: str, session: str
    ) -> bool:
        row = _still_with(tx, name, address, password, browser, "users set")
        if row is None:
            return False
        tx.connection.execute(update(web_user).where(web_user.c.id == row.id).values(password=new))
        others = (web_session.c.user_id == row.id, web_session.c.digest != digest_of(session))
        tx.connection.execute(delete(web_session).where(*others))
        told = {"role": row.role, "has_new_password": True}
        tx.act("users set", f"user {name}", before={"role": row.role}, after=told)
        return True

    @reading
    def own_sessions(self, tx: Tx, session: str) -> list[SessionRow]:
        """Return the open sessions of whose session this is, that used last first; those by links are of one user."""
        columns = (web_session.c.id, web_session.c.began_at, web_session.c.used_at, web_session.c.address)
        is_this = (web_session.c.digest == digest_of(session)).label("is_this")
        found = select(*columns, is_this).where(_of_same_user(session), _is_open(tx))
        found = found.order_by(web_session.c.used_at.desc(), web_session.c.id.desc()).limit(SESSIONS_PER_USER_MAX)
        return [
            SessionRow(row.id, row.began_at, row.used_at, row.address, bool(row.is_this))
            for row in tx.connection.execute(found)
        ]

    @acting
    def end_own_sessions(self, tx: Tx, name: str, session: str, session_id: int | None = None) -> int:
        """End one of the sessions of whose session this is, or all others; return how many there were."""
        which = web_session.c.digest != digest_of(session) if session_id is None else web_session.c.id == session_id
        ids = tx.connection.execute(select(web_session.c.id).where(_of_same_user(session), which)).scalars().all()
        ended = tx.connection.execute(delete(web_session).where(web_session.c.id.in_(ids))).rowcount
        tx.act("users revoke", f"user {name}", after={"sessions": ended}, changed=ended > 0)
        return ended

    @reading
    def named(self, tx: Tx, name: str) -> User | None:
        """Return the user of a name that somebody else has made sure of; None if there is none."""
        found = select(web_user.c.name, web_user.c.role).where(web_user.c.name == name)
        row = tx.connection.execute(found).first()
        return None if row is None else User(row.name, row.role, is_named=True)

    @acting
    def note_refusal(self, tx: Tx, action: Action, subject: str, times: int, last: Written | None) -> Written | None:
        """Write that this user may not do what was asked for so many times; return the row.

        ``last``: the row to count them in; None: a new one.
        """
        tx.written = last
        tx.act(action, subject, counts={"times": times}, is_refused=True)
        return tx.written

    @acting
    def begin_local_session(self, tx: Tx, name: str, role: Role, address: str) -> str:
        """Begin a session for whoever has opened a link that the process has printed; return its token."""
        tx.act("users log in", f"user {name}", after={"by": "link", "role": role})
        return _new_session(tx, address, name=name, role=role)

    @reading
    def session(self, tx: Tx, token: str) -> tuple[User, float] | None:
        """Return the user of an open session, and the seconds since its use was written down; None if it is not open.

        The role of a user is the present one.
        """
        columns = (web_session.c.name, web_session.c.role, web_session.c.used_at)
        of_user = (web_user.c.name.label("user"), web_user.c.role.label("user_role"))
        joined = web_session.outerjoin(web_user, web_user.c.id == web_session.c.user_id)
        found = select(*columns, *of_user).select_from(joined)
        row = tx.connection.execute(found.where(web_session.c.digest == digest_of(token), _is_open(tx))).first()
        if row is None:
            return None
        is_local = row.user is None
        user = User(row.name if is_local else row.user, row.role if is_local else row.user_role, is_local)
        return user, (tx.now - row.used_at).total_seconds()

    @writing
    def note_use(self, tx: Tx, token: str) -> None:
        """Write down that a session is used now."""
        of_token = web_session.c.digest == digest_of(token)
        tx.connection.execute(update(web_session).where(of_token, _is_open(tx)).values(used_at=tx.now))

    @writing
    def end_session(self, tx: Tx, token: str) -> None:
        """End a session."""
        tx.connection.execute(delete(web_session).where(web_session.c.digest == digest_of(token)))


def _counted(tx: Tx, name: str, address: str, browser: str) -> list[tuple[str, str, int]]:
    """Return under which users and places an attempt is counted, and how many failures each has free.

    That of the address is first: whoever tries many names leaves no row for those that are not looked at.
    """
    if browser:
        since = tx.now - timedelta(seconds=BROWSER_KNOWN_S)
        mine = (web_browser.c.digest == digest_of(browser), web_browser.c.used_at >= since, web_user.c.name == name)
        found = select(web_browser.c.digest).select_from(web_browser.join(web_user)).where(*mine)
        if tx.connection.execute(found).first() is not None:
            return [(name, f"browser {digest_of(browser)}", GUESSES_FREE)]
    return [(EVERYONE, address, GUESSES_OF_ADDRESS_FREE), (name, address, GUESSES_FREE)]


def _still_with(tx: Tx, name: str, address: str, password: str, browser: str, action: Action) -> Any:
    """Lock and return a user who has this hash of a password, whose failures are forgotten; None, which is a refusal.

    They are forgotten in the order in which attempts lock them, so that two do not deadlock.
    """
    row = tx.connection.execute(select(web_user).where(web_user.c.name == name).with_for_update()).first()
    if row is None or row.password != password:  # it was changed meanwhile
        tx.act(action, f"user {name}", is_refused=True)
        return None
    for user, place, _ in _counted(tx, name, _place_of(address), browser):
        tx.connection.execute(delete(web_guess).where(web_guess.c.user == user, web_guess.c.address == place))
    return row


def _know_browser(tx: Tx, user_id: int, browser: str) -> str:
    """Have a browser be one that this user has logged in with; return its token."""
    if browser:
        mine = (web_browser.c.digest == digest_of(browser), web_browser.c.user_id == user_id)
        if tx.connection.execute(update(web_browser).where(*mine).values(used_at=tx.now)).rowcount:
            return browser
    token = secrets.token_urlsafe(TOKEN_BYTES)
    of_user = web_browser.c.user_id == user_id
    newest = select(web_browser.c.digest).where(of_user).order_by(web_browser.c.used_at.desc())
    kept = tx.connection.execute(newest.limit(BROWSERS_PER_USER_MAX - 1)).scalars().all()
    tx.connection.execute(delete(web_browser).where(of_user, web_browser.c.digest.not_in(kept)))
    row = {"digest": digest_of(token), "user_id": user_id, "used_at": tx.now}
    tx.connection.execute(insert(web_browser).values(row))
    return token


def _of_same_user(session: str) -> ColumnElement[bool]:
    """Return the condition that a session has the same user as this one; all by links have the same."""
    this = web_session.alias("this")
    same = or_(this.c.user_id == web_session.c.user_id, and_(this.c.user_id.is_(None), web_session.c.user_id.is_(None)))
    return select(ONE).select_from(this).where(this.c.digest == digest_of(session), same).exists()


def _place_of(address: str) -> str:
    """Return under which address a guess is counted: a process may connect from all those of its own machine.

    A machine with IPv6 has a whole network of them.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.is_loopback:
        return LOOPBACK
    return str(found) if found.version == 4 else str(ipaddress.IPv6Network((int(found), MACHINE_BITS), strict=False))


def wait_s(failures: int) -> float:
    """Return how long to wait after so many failures beyond those that are free, in seconds."""
    return min(2.0 ** min(failures, 20), GUESS_WAIT_S_MAX)


def hashed(password: str) -> str:
    """Return the hash of a password, with the parameters and the salt that it was made with."""
    salt = secrets.token_bytes(SALT_BYTES)
    found = hashlib.scrypt(password.encode(), salt=salt, **SCRYPT)
    return "$".join(("scrypt", str(SCRYPT["n"]), str(SCRYPT["r"]), str(SCRYPT["p"]), salt.hex(), found.hex()))


def is_password(password: str, known: str) -> bool:
    """Whether this is the password of a hash that `hashed` has made."""
    _, n, r, p, salt, digest = known.split("$")
    text = password.encode("utf-8", "surrogatepass")
    given = hashlib.scrypt(text, salt=bytes.fromhex(salt), n=int(n), r=int(r), p=int(p), maxmem=SCRYPT["maxmem"])
    return hmac.compare_digest(given.hex(), digest)


def digest_of(token: str) -> str:
    """Return the hash under which a token is kept; it has 256 random bits, so a fast one is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _new_session(
    tx: Tx, address: str, *, user_id: int | None = None, name: str | None = None, role: Role | None = None
) -> str:
    token = secrets.token_urlsafe(TOKEN_BYTES)
    tx.connection.execute(delete(web_session).where(~_is_open(tx)))
    same = web_session.c.user_id.is_(None) if user_id is None else web_session.c.user_id == user_id
    kept = select(web_session.c.id).where(same).order_by(web_session.c.used_at.desc()).limit(SESSIONS_PER_USER_MAX - 1)
    ids = tx.connection.execute(kept).scalars().all()
    tx.connection.execute(delete(web_session).where(same, web_session.c.id.not_in(ids)))
    times = {"began_at": tx.now, "used_at": tx.now}
    row = {"digest": digest_of(token), "user_id": user_id, "name": name, "role": role, "address": address, **times}
    tx.connection.execute(insert(web_session).values(row))
    return token


def _is_open(tx: Tx) -> ColumnElement[bool]:
    idle, whole = timedelta(seconds=SESSION_IDLE_S_MAX), timedelta(seconds=SESSION_S_MAX)
    return and_(web_session.c.used_at >= tx.now - idle, web_session.c.began_at >= tx.now - whole)


def _locked(tx: Tx, name: str) -> Any:
    row = tx.connection.execute(select(web_user).where(web_user.c.name == name).with_for_update()).first()
    if row is None:
        raise NoSuchRow("user", name)
    return row
