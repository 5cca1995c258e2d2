"""Who may see pages, from where, and what every answer says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.testclient import TestClient
from tests.web.conftest import BASE, OURS, token_of

from headgate.web.app import make_app
from headgate.web.guard import HEADERS, LOGIN
from headgate.web.routes import ROUTES, Route
from headgate.web.sessions import form_token
from headgate.web.views import Site

ANYTHING = "1"  # in place of each part of a path
GETS = [route for route in ROUTES if route.method == "GET"]
POSTS = [route for route in ROUTES if route.method == "POST"]
BEHIND_LOGIN = [route for route in ROUTES if route.role != "nobody"]


def path_of(route: Route) -> str:
    """Return a path that the route takes."""
    parts = (ANYTHING if part.startswith("{") else part for part in route.path.split("/"))
    return "/".join(parts)


def by_path(route: Route) -> str:
    return f"{route.method} {route.path}"


def test_every_path_and_method_is_there_once() -> None:
    assert len({by_path(route) for route in ROUTES}) == len(ROUTES)


def test_only_logging_in_is_for_nobody() -> None:
    assert [by_path(route) for route in ROUTES if route.role == "nobody"] == [
        "GET /login",
        "POST /login",
        "POST /login/link",
    ]


def test_a_stranger_is_sent_to_the_login(stranger: TestClient) -> None:
    for route in BEHIND_LOGIN:
        answer = stranger.request(route.method, path_of(route), headers=OURS)
        assert answer.status_code == 303, route
        assert answer.headers["location"].startswith(LOGIN)
        if route.is_list:
            assert stranger.get(f"{path_of(route)}.json").status_code == 401


def test_another_host_is_refused_before_anything_else(client: TestClient) -> None:
    for route in ROUTES:
        for host in ("evil.example", "127.0.0.1.evil.example:8780", "10.0.0.1:8780", ""):
            answer = client.request(route.method, path_of(route), headers={"host": host})
            assert answer.status_code == 421, (host, route)
            assert "set-cookie" not in answer.headers


def test_the_names_of_this_machine_are_taken(client: TestClient) -> None:
    for host in ("127.0.0.1:8780", "localhost:8780", "[::1]:8780", "localhost", "127.8.9.1"):
        assert client.get("/runs.json", headers={"host": host}).status_code == 200, host


def test_every_answer_has_the_headers(client: TestClient, browser: Callable[[], TestClient]) -> None:
    stranger = browser()
    for route in sorted(ROUTES, key=lambda route: route.path == "/logout"):
        for one in (client, stranger):
            answer = one.request(route.method, path_of(route), headers=OURS)
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, route
            assert answer.headers["cache-control"] == "no-store"


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"


FOREIGN: tuple[dict[str, str], ...] = (
    {},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "origin": BASE},
)


def test_a_form_of_another_site_is_refused(client: TestClient) -> None:
    for route in POSTS:
        for headers in FOREIGN:
            answer = client.post(path_of(route), headers=headers, data={"token": token_of(client)})
            assert answer.status_code == 403, (route, headers)


def test_a_form_of_another_session_is_refused(client: TestClient) -> None:
    for route in POSTS:
        if route.role != "nobody":
            for token in ({}, {"token": ""}, {"token": form_token("another")}):
                answer = client.post(path_of(route), headers=OURS, data=token)
                assert (answer.status_code, "of another session" in answer.text) == (403, True), route


def test_an_old_browser_may_say_by_origin_that_a_form_is_ours(client: TestClient) -> None:
    data = {"token": token_of(client)}
    assert client.post("/logout", headers={"origin": BASE}, data=data).status_code == 303


def test_logging_in_and_out(stranger: TestClient, site: Site) -> None:
    link = {"token": site.links.new()}
    answer = stranger.get("/login", params=link)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("headgate-8780=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert stranger.get("/runs").status_code == 200
    assert stranger.get("/login", params=link).status_code == 403
    data = {"token": token_of(stranger)}
    assert stranger.post("/logout", headers=OURS, data=data).headers["location"] == LOGIN
    assert stranger.get("/runs").status_code == 303


def test_after_the_login_one_is_where_one_wanted_to_be(stranger: TestClient, site: Site) -> None:
    answer = stranger.get("/runs?state=failed&dag=a%26b")
    assert answer.headers["location"] == "/login?next=%2Fruns%3Fstate%3Dfailed%26dag%3Da%2526b"
    quoted = stranger.get("/dags/50%252525").headers["location"]  # this client takes one quoting more off
    assert quoted == "/login?next=%2Fdags%2F50%252525"
    assert stranger.get(f"/runs?dag={'x' * 600}").headers["location"] == LOGIN, "it would not be taken there"
    wanted = {"token": site.links.new(), "next": "/runs?state=failed"}
    assert stranger.get("/login", params=wanted).headers["location"] == "/runs?state=failed"


def test_a_login_leads_to_no_other_site(stranger: TestClient, site: Site) -> None:
    for place in ("//evil.example", "http://evil.example", "/\\evil.example", "evil", ""):
        answer = stranger.get("/login", params={"token": site.links.new(), "next": place})
        assert answer.headers["location"] == "/", place


def test_another_link_is_printed_and_not_sent(site: Site) -> None:
    printed: list[str] = []
    asked = msgspec.structs.replace(site, print_link=printed.append)
    browser = TestClient(make_app(asked), base_url=BASE, follow_redirects=False)
    answer = browser.post("/login/link", headers=OURS)
    assert answer.headers["location"] == "/login?said=printed"
    assert len(printed) == 1
    assert printed[0] not in answer.text + str(answer.headers)
    assert browser.post("/login/link", headers=OURS).headers["location"].endswith("wait")
    assert browser.get("/login", params={"token": printed[0]}).status_code == 303


def test_a_fragment_for_a_stranger_leads_to_the_login(stranger: TestClient) -> None:
    answer = stranger.get("/", headers={"hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, LOGIN)
