"""One's own account: the password, the browsers that are logged in, and how fast somebody may guess."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient
from tests.store.harness import OpenStore, Query
from tests.waiting import WITHIN_S
from tests.web.conftest import OURS, SCRYPT_OF_PRODUCT, token_of
from tests.web.test_acting import log_in

from headgate.store.access import users
from headgate.store.access.users import BROWSERS_PER_USER_MAX, GUESSES_FREE, GUESSES_OF_ADDRESS_FREE, LoggedIn
from headgate.store.store import Store
from headgate.store.tables import web_guess

Browser = Callable[[], TestClient]
NEW = " a much better one "


@pytest.fixture
def password(store: Store) -> str:
    """The password of ``ada``."""
    return store.access.add_user("ada", "viewer")


def fail_often(store: Store) -> None:
    """Have all who have failed wait for longer than a test takes."""
    with store.database.writing() as tx:
        tx.connection.execute(update(web_guess).values(failures=GUESSES_OF_ADDRESS_FREE + 9, last_at=tx.now))


def post(client: TestClient, path: str, **form: str) -> str:
    answer = client.post(path, headers=OURS, data={"token": token_of(client), **form})
    return answer.headers["location"] if answer.status_code == 303 else f"{answer.status_code} {answer.text}"


def test_users_change_their_own_password(browser: Browser, password: str, query: Query, store: Store) -> None:
    client, other = log_in(browser(), "ada", password), log_in(browser(), "ada", password)

    def change(old: str, new: str = NEW, again: str = NEW) -> str:
        return post(client, "/account/password", password=old, new=new, again=again)

    assert change("wrong") == "/account?said=wrong"
    assert "was not written twice" in change(password, again=NEW.strip())
    assert "a password has 12 to 1,000 characters" in change(password, "short", "short")
    assert "a password has 12 to 1,000 characters" in change(password, "x" * 1001, "x" * 1001)
    assert other.get("/account").status_code == 200
    assert change(password) == "/account?said=changed"
    assert "The password was changed" in client.get("/account?said=changed").text, "this browser stays logged in"
    assert other.get("/account").status_code == 303
    assert store.access.log_in("ada", password, "10.0.0.1") is None
    assert isinstance(store.access.log_in("ada", NEW, "10.0.0.1"), LoggedIn)
    assert log_in(browser(), "ada", NEW).get("/runs").status_code == 200, "with the spaces around it"
    told = query("SELECT * FROM audit WHERE action = 'users set' ORDER BY id")
    assert [(row["actor"], row["role"], row["object"], row["outcome"]) for row in told] == [
        ("ada", "viewer", "user ada", "refused"),
        ("ada", "viewer", "user ada", "done"),
    ]
    assert NEW.strip() not in str(query("SELECT * FROM audit")) + str(query("SELECT * FROM web_user"))


def test_guesses_of_an_open_session_are_slowed_too(browser: Browser, password: str, store: Store) -> None:
    client = log_in(browser(), "ada", password)
    assert post(client, "/account/password", password="wrong", new=NEW, again=NEW) == "/account?said=wrong"
    fail_often(store)
    assert post(client, "/account/password", password=password, new=NEW, again=NEW) == "/account?said=wrong"


def test_a_password_that_was_right_is_no_guess(browser: Browser, password: str) -> None:
    client, old = log_in(browser(), "ada", password), password
    for number in range(GUESSES_FREE + 1):
        new = f"the next one, number {number}"
        assert post(client, "/account/password", password=old, new=new, again=new) == "/account?said=changed"
        old = new
    log_in(client, "ada", old)


def test_a_machine_with_many_addresses_guesses_no_faster(password: str, store: Store) -> None:
    assert store.access.log_in("ada", "wrong", "2001:db8::1") is None
    assert store.access.log_in("ada", "wrong", "10.0.0.1") is None
    fail_often(store)
    assert store.access.log_in("ada", password, "2001:db8::2") is None
    for other in ("2001:db8:0:1::1", "10.0.0.2"):
        assert store.access.log_in("ada", password, other) is not None


def test_many_who_log_in_from_one_address_at_once_do_not_refuse_each_other(
    open_store: OpenStore, password: str, patient_sqlite: None
) -> None:
    """Each deletes the counts of its address when it is in, while others are counted."""
    start = Barrier(3)

    def log_in_often(number: int) -> int:
        store = open_store()
        start.wait(WITHIN_S)
        return sum(store.access.log_in("ada", password, "10.0.0.1") is not None for _ in range(8))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(log_in_often, range(3))) == [8, 8, 8]


def test_who_came_by_a_link_has_no_password_to_change(client: TestClient) -> None:
    assert "Change the password" not in client.get("/account").text
    assert "has a password here" in post(client, "/account/password", password="x", new=NEW, again=NEW)


def test_users_see_and_end_their_own_sessions(browser: Browser, password: str, store: Store, query: Query) -> None:
    mine, first, second = (log_in(browser(), "ada", password) for _ in range(3))
    stranger = log_in(browser(), "eve", store.access.add_user("eve", "admin"))
    ids = [row["id"] for row in query("SELECT id FROM web_session ORDER BY id")]
    shown = mine.get("/account").text
    assert shown.count("Log out the one from testclient") == 2
    assert shown.count("this browser") == 1
    assert post(mine, "/account/sessions", session=str(ids[3])).startswith("/account?act="), "it is nobody's of these"
    assert stranger.get("/runs").status_code == 200
    post(mine, "/account/sessions", session=str(ids[1]))
    assert [one.get("/runs").status_code for one in (mine, first, second)] == [200, 303, 200]
    post(mine, "/account/sessions")
    assert [one.get("/runs").status_code for one in (mine, second, stranger)] == [200, 303, 200]
    told = query("SELECT * FROM audit WHERE action = 'users revoke' ORDER BY id")
    assert [(row["object"], row["after"], row["outcome"]) for row in told] == [
        ("user ada", '{"sessions": 0}', "unchanged"),
        ("user ada", '{"sessions": 1}', "done"),
        ("user ada", '{"sessions": 1}', "done"),
    ]


def test_guessing_from_the_same_address_locks_no_browser_out_that_is_known(
    browser: Browser, password: str, store: Store
) -> None:
    known = log_in(browser(), "ada", password)
    for name in ("ada", "other"):  # by any process of this machine, or any of its users
        assert store.access.log_in(name, "wrong", "testclient") is None
    fail_often(store)
    stranger = browser().post("/login", headers=OURS, data={"name": "ada", "password": password})
    assert stranger.status_code == 403, "a browser that is not known has to wait"
    log_in(known, "ada", password)
    assert known.get("/runs").status_code == 200


def test_a_known_browser_is_slowed_by_its_own_guesses_and_known_for_its_user_alone(
    browser: Browser, password: str, store: Store, query: Query
) -> None:
    known, other = log_in(browser(), "ada", password), store.access.add_user("eve", "viewer")
    token = known.cookies["headgate-8780-browser"]
    assert token not in str(query("SELECT * FROM web_browser"))
    assert store.access.log_in("ada", "wrong", "10.0.0.9", token) is None
    fail_often(store)
    assert store.access.log_in("ada", password, "10.0.0.9", token) is None, "it is too early for this one"
    assert store.access.log_in("ada", password, "10.0.0.9") is not None, "and not for others"
    assert store.access.log_in("eve", "wrong", "10.0.0.8", token) is None
    fail_often(store)
    assert store.access.log_in("eve", other, "10.0.0.8", token) is None, "it is known for ada alone"
    assert store.access.session(token) is None, "it is no session"


def test_as_many_browsers_of_a_user_are_known_as_are_kept(password: str, store: Store, query: Query) -> None:
    tokens = []
    for _ in range(BROWSERS_PER_USER_MAX + 2):
        found = store.access.log_in("ada", password, "10.0.0.9")
        assert found is not None
        tokens.append(found.browser)
    assert len(query("SELECT * FROM web_browser")) == BROWSERS_PER_USER_MAX
    again = store.access.log_in("ada", password, "10.0.0.9", tokens[-1])
    assert again is not None
    assert again.browser == tokens[-1]
    store.access.remove_user("ada")
    assert query("SELECT * FROM web_browser") == []


def test_a_password_is_judged_by_the_cost_it_was_hashed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dict(users.SCRYPT)
    for name, value in SCRYPT_OF_PRODUCT.items():
        monkeypatch.setitem(users.SCRYPT, name, value)
    known = users.hashed("a password of mine")
    # OWASP's cheat sheet on the storage of passwords asks for as much.
    assert [int(part) for part in known.split("$")[1:4]] == [2**15, 8, 3]
    monkeypatch.setitem(users.SCRYPT, "n", quick["n"])
    assert users.is_password("a password of mine", known)
    assert not users.is_password("a password of yours", known)
