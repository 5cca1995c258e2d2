"""Who sent a request: a proxy's headers count if the connection comes from a listed address, and never else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.web.conftest import OURS, PORT

from headgate.store.store import Store
from headgate.supervisor.metrics.address import Address, parse_network
from headgate.web.acts import act_path
from headgate.web.app import make_app
from headgate.web.senders import HOPS_MAX, NAME_CHARS_MAX, BadSender, Front
from headgate.web.server import ServerRefused, check_address
from headgate.web.views import Site

HEADER = "X-Forwarded-User"
NAME = "ops.example.org"
PROXY, OTHER = "10.1.2.3", "10.1.3.3"
FRONT = Front(
    hosts=frozenset({NAME}),
    proxies=(parse_network("10.1.2.0/24"), parse_network("fd00::5")),
    user_header=HEADER,
    needs_tls=True,
    has_links=False,
)
TLS = {"X-Forwarded-Proto": "https"}
Reached = Callable[..., TestClient]


@pytest.fixture
def reached(site: Site) -> Iterator[Reached]:
    """Returns a client whose connections come from an address, of pages that stand behind proxies."""
    with ExitStack() as opened:

        def new(peer: str, front: Front = FRONT, base: str = f"http://{NAME}") -> TestClient:
            app = make_app(msgspec.structs.replace(site, front=front))
            return opened.enter_context(TestClient(app, base_url=base, follow_redirects=False, client=(peer, 40_000)))

        yield new


@pytest.fixture
def ada(store: Store) -> str:
    """A user of the pages."""
    store.access.add_user("ada", "operator")
    return "ada"


@pytest.mark.parametrize("peer", [PROXY, "fd00::5", f"::ffff:{PROXY}"])
def test_a_listed_proxy_names_the_user(reached: Reached, ada: str, peer: str) -> None:
    client = reached(peer)
    answer = client.get("/audit", headers={HEADER: ada, **TLS})
    assert answer.status_code == 200
    assert "ada, operator" in answer.text
    assert "Log out" not in answer.text, "there is no session to end"
    assert client.get("/runs", headers=TLS).headers["location"].startswith("/login"), "it names nobody"


def test_a_name_that_is_not_of_ascii_is_in_utf_8() -> None:
    def named(value: bytes) -> str | None:
        scope = {"type": "http", "client": (PROXY, 1), "headers": [(HEADER.lower().encode(), value)]}
        return FRONT.sender(scope).user

    assert named("Zoë".encode()) == "Zoë"
    with pytest.raises(BadSender, match="UTF-8"):
        named("Zoë".encode("latin-1"))


def test_a_named_user_ends_no_session_of_somebody_else(reached: Reached, ada: str, store: Store) -> None:
    password = store.access.add_user("eve", "viewer")
    client, other = reached(PROXY, base=f"https://{NAME}"), reached(PROXY, base=f"https://{NAME}")
    for one in (client, other):
        form = {"name": "eve", "password": password}
        assert one.post("/login", headers={**TLS, **OURS}, data=form).status_code == 303
    shown = client.get("/signals", headers={HEADER: ada, **TLS}).text
    token = shown.partition('name="token" value="')[2].partition('"')[0]
    headers = {HEADER: ada, **TLS, **OURS}
    assert client.post("/account/sessions", headers=headers, data={"token": token}).status_code == 400
    assert other.get("/runs", headers=TLS).status_code == 200


@pytest.mark.parametrize("peer", [OTHER, "127.0.0.1", "::1", "10.1.2", "testclient", "fd00::6"])
def test_nobody_else_can_name_a_user(reached: Reached, ada: str, peer: str) -> None:
    for front in (FRONT, msgspec.structs.replace(FRONT, needs_tls=False)):
        client = reached(peer, front)
        for named in (HEADER, HEADER.lower(), "X_Forwarded_User", "Remote-User", "X-Remote-User"):
            answer = client.get(
                "/runs", headers={named: ada, "X-Forwarded-For": PROXY, "Forwarded": f"for={PROXY}", **TLS}
            )
            assert answer.status_code in (303, 403), named
            assert "ada, operator" not in answer.text
            assert answer.status_code == 403 or answer.headers["location"].startswith("/login")


def test_a_header_that_is_not_set_is_believed_of_nobody(reached: Reached, ada: str) -> None:
    for front in (msgspec.structs.replace(FRONT, user_header=None), Front(hosts=frozenset({NAME}), user_header=HEADER)):
        answer = reached(PROXY, front).get("/runs", headers={HEADER: ada, **TLS})
        assert answer.headers.get("location", "").startswith("/login") or answer.status_code == 403


@pytest.mark.parametrize("near", ["X-Forwarded_User", "X-Forwarded-Users", "Forwarded-User", "X-Forwarded-User-Name"])
def test_a_header_of_nearly_the_same_name_is_another_one(reached: Reached, ada: str, near: str) -> None:
    assert reached(PROXY).get("/runs", headers={near: ada, **TLS}).headers["location"].startswith("/login")


def test_a_header_that_came_twice_is_refused(reached: Reached, ada: str) -> None:
    client = reached(PROXY)
    twice = client.get("/runs", headers=[(HEADER, "eve"), (HEADER, ada), *TLS.items()])
    assert (twice.status_code, "2 times" in twice.text) == (400, True)
    for name in ("a\tb", "x" * (NAME_CHARS_MAX + 1)):
        assert client.get("/runs", headers={HEADER: name, **TLS}).status_code == 400


def test_a_named_user_has_to_be_one_of_these_pages_and_has_the_role_of_now(
    reached: Reached, ada: str, store: Store
) -> None:
    client = reached(PROXY)
    for stranger in ("eve", "ADA", "ada,eve", "local"):
        answer = client.get("/runs", headers={HEADER: stranger, **TLS})
        assert (answer.status_code, "who is no user" in answer.text) == (403, True)
    store.access.set_user(ada, role="viewer")
    assert client.get("/audit", headers={HEADER: ada, **TLS}).status_code == 403
    store.access.remove_user(ada)
    assert client.get("/runs", headers={HEADER: ada, **TLS}).status_code == 403


def test_the_form_of_one_named_user_is_not_that_of_another(
    reached: Reached, ada: str, store: Store, query: Query
) -> None:
    store.access.add_user("eve", "operator")
    client = reached(PROXY)

    shown = client.get("/signals", headers={HEADER: ada, **TLS}).text
    mine = shown.partition('name="token" value="')[2].partition('"')[0]
    assert mine
    form = {"token": mine, "key": "k", "value": "1"}
    sent = client.post(act_path("signals send"), headers={HEADER: "eve", **TLS, **OURS}, data=form)
    assert (sent.status_code, "of another session" in sent.text) == (403, True)
    hops = {"X-Forwarded-For": "203.0.113.9, 198.51.100.7"}
    sent = client.post(act_path("signals send"), headers={HEADER: ada, **TLS, **OURS, **hops}, data=form)
    assert sent.status_code == 303, sent.text
    (row,) = query("SELECT * FROM audit WHERE action = 'signals send'")
    assert (row["actor"], row["role"], row["address"]) == ("ada", "operator", "198.51.100.7")


@pytest.mark.parametrize(
    ("peer", "hops", "address"),
    [
        (PROXY, "198.51.100.7", "198.51.100.7"),
        (PROXY, "203.0.113.9, 198.51.100.7, 10.1.2.9", "198.51.100.7"),  # it came over two listed proxies
        (PROXY, "203.0.113.9, unknown", PROXY),
        (PROXY, "203.0.113.9, 198.51.100.7:4711, 10.1.2.9:80", "198.51.100.7"),  # with ports, as some write them
        (PROXY, "[2001:db8::1]:4711", "2001:db8::1"),
        (PROXY, "[2001:db8::1]", "2001:db8::1"),
        (PROXY, "2001:db8::1", "2001:db8::1"),
        (PROXY, "[198.51.100.7:80, 198.51.100.7:", PROXY),
        (PROXY, "", PROXY),
        (PROXY, "203.0.113.9, bad, 10.1.2.9", "10.1.2.9"),
        (PROXY, ", ".join(["10.1.2.9"] * (HOPS_MAX + 5)), "10.1.2.9"),
        (OTHER, "198.51.100.7", OTHER),
        (f"::ffff:{OTHER}", "198.51.100.7", OTHER),
        (f"::ffff:{PROXY}", "::ffff:198.51.100.7, ::ffff:10.1.2.9", "198.51.100.7"),
    ],
)
def test_the_address_is_the_last_one_that_no_listed_proxy_has(peer: str, hops: str, address: str) -> None:
    scope = {"type": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", hops.encode())]}
    assert FRONT.sender(scope).address == address


@pytest.mark.parametrize(
    ("peer", "said", "status"),
    [
        (PROXY, {"X-Forwarded-Proto": "https"}, 200),
        (PROXY, {"X-Forwarded-Proto": "HTTPS"}, 200),
        (PROXY, {"X-Forwarded-Proto": "http"}, 403),
        (PROXY, {"X-Forwarded-Proto": "https, http"}, 403),
        (PROXY, {}, 403),
        (OTHER, {"X-Forwarded-Proto": "https"}, 403),
        ("127.0.0.1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
    ],
)
def test_without_tls_pages_answer_this_machine_alone(
    reached: Reached, peer: str, said: dict[str, str], status: int
) -> None:
    assert reached(peer).get("/login", headers=said).status_code == status
    plain = msgspec.structs.replace(FRONT, needs_tls=False)
    assert reached(peer, plain).get("/login", headers=said).status_code == 200


def test_a_host_is_this_machine_or_one_that_is_set(reached: Reached) -> None:
    client = reached(PROXY)
    for host, status in ((NAME, 200), (NAME.upper(), 200), (f"{NAME}:443", 200), ("evil.example", 421)):
        assert client.get("/login", headers={"host": host, **TLS}).status_code == status


def test_over_tls_cookies_are_of_this_host_and_of_tls_alone(reached: Reached, store: Store) -> None:
    password = store.access.add_user("eve", "viewer")
    client = reached(PROXY, base=f"https://{NAME}")
    form = {"name": "eve", "password": password}
    answer = client.post("/login", headers={**TLS, **OURS}, data=form)
    assert answer.status_code == 303
    cookies = answer.headers.get_list("set-cookie")
    assert [cookie.partition("=")[0] for cookie in cookies] == [
        f"__Host-headgate-{PORT}",
        f"__Host-headgate-{PORT}-browser",
    ]
    assert all("; Secure" in cookie and "; Path=/" in cookie and "HttpOnly" in cookie for cookie in cookies)
    assert client.get("/runs", headers=TLS).status_code == 200


def test_other_machines_get_no_link(reached: Reached, site: Site) -> None:
    client, printed = reached(PROXY), site.links.new()
    assert client.get("/login", params={"token": printed}, headers=TLS).status_code == 403
    assert client.post("/login/link", headers={**TLS, **OURS}).headers["location"].endswith("wait")
    assert "Print another link" not in client.get("/login", headers=TLS).text


@pytest.mark.parametrize(
    ("front", "is_plain", "has_users", "problem"),
    [
        (FRONT, False, True, None),
        (Front(hosts=frozenset({NAME})), True, True, None),
        (Front(proxies=FRONT.proxies), False, True, "web_hosts"),
        (Front(hosts=frozenset({NAME})), False, True, "web_trusted_proxies"),
        (FRONT, False, False, "headgate users add"),
    ],
)
def test_an_address_that_others_reach_needs_names_tls_and_users(
    front: Front, is_plain: bool, has_users: bool, problem: str | None
) -> None:
    def check(host: str) -> None:
        check_address(Address(host, 8780), front, is_plain=is_plain, has_users=lambda: has_users)

    check("127.0.0.1")
    for host in ("0.0.0.0", "10.0.0.7", "::"):
        if problem is None:
            check(host)
        else:
            with pytest.raises(ServerRefused, match=problem):
                check(host)
