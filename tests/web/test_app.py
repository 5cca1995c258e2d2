"""What holds for all pages: templates, errors, lists as JSON, files, and a store that can do nothing but read."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import sqlalchemy
from starlette.testclient import TestClient
from tests.web.test_guard import GETS, path_of

from headgate.store.errors import BadKey, StoreError
from headgate.store.store import Store
from headgate.web.cells import TEXT_CHARS_MAX, Cell, Code, Error, path
from headgate.web.rendering import environment, mask_passwords, read_static
from headgate.web.routes import ROUTES
from headgate.web.stores import STORES_MAX
from headgate.web.views import Site

WEB = Path(str(resources.files("headgate.web")))
TESTS = Path(__file__).parents[1]
TEMPLATES = sorted((WEB / "templates").rglob("*.html"))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", [WEB / "static" / "vendor", TESTS / "browser" / "vendor"], ids=["pages", "tests"])
def test_what_others_have_written_is_as_they_wrote_it(vendor: Path) -> None:
    packages = tomllib.loads((vendor / "VENDORED.toml").read_text())["package"]
    listed = {"VENDORED.toml"}
    for package in packages:
        assert (vendor / package["licence_file"]).read_text().strip()
        listed.add(package["licence_file"])
        for file in package["file"]:
            assert hashlib.sha256((vendor / file["path"]).read_bytes()).hexdigest() == file["sha256"]
            listed.add(file["path"])
    assert {str(file.relative_to(vendor)) for file in vendor.rglob("*") if file.is_file()} == listed


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_templates_mark_nothing_as_safe_and_need_nothing_inline(template: Path) -> None:
    text = template.read_text()
    assert not re.search(r"\|\s*safe\b|Markup|autoescape", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|hx-on|hx-vals=.js:", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"https?://", text)


def test_files_are_kept_by_browsers_as_long_as_they_are_the_same(stranger: TestClient) -> None:
    text = stranger.get("/login").text
    named = re.findall(r'"(/static/[^"]+)"', text)
    assert len(set(named)) == 4
    for url in named:
        answer = stranger.get(url)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert stranger.get(named[0].partition("?")[0]).headers["cache-control"] == "no-cache"
    for none in ("/static/../app.py", "/static/app.py", "/static/%2e%2e/app.py", "/static/"):
        assert stranger.get(none).status_code in (404, 303)


# --- pages ---------------------------------------------------------------------------------------


def test_every_page_answers_on_an_empty_database(client: TestClient) -> None:
    for route in GETS:
        answer = client.get(path_of(route))
        assert answer.status_code == (404 if "{" in route.path else 200), answer.text
        assert "<main" in answer.text
        if route.is_list and "{" not in route.path:
            told = client.get(f"{path_of(route)}.json").json()
            assert set(told) == {"as_of", "rows", "next_beyond"}


def test_a_fragment_is_the_part_that_lives(client: TestClient) -> None:
    for route in GETS:
        if route.reads:
            text = client.get(path_of(route), headers={"hx-request": "true"}).text
            assert "<html" not in text
            if "{" not in route.path:
                assert text.lstrip().startswith('<div id="live"'), route


def test_the_menu_leads_to_pages_that_are_there(client: TestClient, page: Callable[..., str]) -> None:
    links = set(re.findall(r'<li><a href="([^"]+)"', page("/")))
    assert links == {route.path for route in ROUTES if route.nav}
    assert all(client.get(link).status_code == 200 for link in links)


def test_what_is_not_there(client: TestClient) -> None:
    answer = client.get("/nothing")
    assert answer.status_code == 404
    assert "There is no such page" in answer.text
    assert client.get("/runs", params={"dag": "x"}).status_code == 404
    assert client.get("/runs.json", params={"dag": "x"}).json() == {"error": "there is no DAG named 'x'"}


def test_what_cannot_be_asked(client: TestClient) -> None:
    for query in ({"since": "yesterday"}, {"state": "odd"}, {"beyond": "-1"}, {"dag": "x" * 501}, {"dag": "a\0b"}):
        assert client.get("/runs", params=query).status_code == 400, query
    assert client.get("/dags/%00").status_code == 400


def test_methods_that_a_page_does_not_have(client: TestClient) -> None:
    answer = client.post("/runs", headers={"sec-fetch-site": "same-origin"})
    assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert client.head("/runs").status_code == 200


def test_names_are_quoted_in_paths() -> None:
    assert path("dags", "a/b ?#", "runs", "scheduled__2026-01-01T00:00:00+00:00") == (
        "/dags/a%2Fb%20%3F%23/runs/scheduled__2026-01-01T00:00:00+00:00"
    )
    assert path("runs", state="failed", dag=None, since="") == "/runs?state=failed"


def test_passwords_in_urls_are_masked() -> None:
    assert mask_passwords("at amqp://u:s3cret@h:1/x: no") == "at amqp://u:***@h:1/x: no"
    assert mask_passwords("redis://:s3cret@h and postgresql://a:b@c") == "redis://:***@h and postgresql://a:***@c"
    assert mask_passwords("http://127.0.0.1:80/a@b") == "http://127.0.0.1:80/a@b"
    assert mask_passwords("amqp://u:s3@cr/e@t@h/x?y and z@w") == "amqp://u:***@h/x?y and z@w"
    assert mask_passwords("redis://u:s3/cret@h:1/0: [1/2] no@one") == "redis://u:***@h:1/0: [1/2] no@one"
    assert mask_passwords("pg://u:12#ab@h pg://u:2024?x@h a://[u]:pw@h") == "pg://u:***@h pg://u:***@h a://[u]:***@h"
    assert mask_passwords("['a://u:s@3@h', 'me@x'] a://u:s/3@h") == "['a://u:***@h', 'me@x'] a://u:***@h"
    assert mask_passwords('{"a":"a://u:s@3@h","b":"b@c"}') == '{"a":"a://u:***@h","b":"b@c"}'
    assert mask_passwords("a://u:s@3@h,b://u:s/3@h") == "a://u:***@h,b://u:***@h"
    assert mask_passwords("a://u:half of") == "a://u:half of"
    assert mask_passwords("it was redis://u:s3cr") == "it was redis://u:***", "it was cut there"
    for text in (
        "http://[::1]:80/a@b",
        "at http://h:8780.",
        "http://h:8780/login",
        "a://h/x:y@z",
        "a://h",
        "(a://h:1)",
    ):
        assert mask_passwords(text) == text
    long = "f" * 2**20  # would take minutes if it was read anew from each letter
    for text in (
        f"{long} redis://:s3cret@h",
        f"{long}://{long}",
        "a://" * 2**18,
        f"a://{long}:{long} ",
        "a://b:" * 2**17 + " ",
    ):
        assert mask_passwords(text) == text.replace("s3cret", "***")


@pytest.mark.parametrize("cell", [str, Code, Error])
def test_a_password_is_masked_before_its_cell_is_cut(cell: Callable[[str], Cell]) -> None:
    templates = environment(read_static())
    macro = templates.get_template("cells.html").module.cell  # type: ignore[attr-defined]
    for before in range(TEXT_CHARS_MAX):
        text = f"{'x' * before} redis://u:{'s3/cret' * 20}@h:1/0"
        assert "s3" not in macro(cell(text)), before


# --- the store -----------------------------------------------------------------------------------


def test_the_stores_of_pages_cannot_write(site: Site, store: Store) -> None:
    store.add_watcher("w", "a.B", {})
    with site.stores.one() as reads:
        assert [watcher.name for watcher in reads.inspect.watchers()] == ["w"]
        with pytest.raises(StoreError, match=r"read-?\s?only|readonly"):
            reads.pause_watcher("w")
    with site.stores.engine.connect() as connection, pytest.raises(sqlalchemy.exc.DBAPIError, match=r"read-?only"):
        connection.exec_driver_sql("DELETE FROM asset_watcher")


def test_the_stores_of_pages_cannot_decrypt(site: Site, store: Store) -> None:
    trigger_id = store.add_watcher("w", "a.B", {"password": "s3cret"})
    with site.stores.one() as reads, pytest.raises(BadKey):
        reads.inspect.trigger_kwargs(trigger_id)


def test_a_statement_ends_in_time(site: Site) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with site.stores.one() as reads, pytest.raises(StoreError, match=r"interrupted|statement timeout"):
        with reads.database.reading() as tx:
            tx.connection.exec_driver_sql(endless).scalar_one()


def test_a_store_is_used_again(site: Site) -> None:
    with site.stores.one() as first:
        first.inspect.now()
    with site.stores.one() as second:
        assert second is first
        with site.stores.one() as third:
            assert third is not first
    assert STORES_MAX >= 2


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_page_is_shown_after_the_server_has_cut_all_connections(client: TestClient, site: Site, store: Store) -> None:
    with site.stores.one() as first, site.stores.one() as second:
        first.inspect.now()
        second.inspect.now()
    others = (
        "FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'headgate'"
    )
    with store.database.reading() as tx:
        ended = tx.connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid, 5000) {others}").scalars().all()
    assert len(ended) >= 2
    assert client.get("/runs").status_code == 200
    assert len(site.stores._idle) == 1, "those that were cut are closed"


def test_a_page_that_fails_says_nothing_of_why(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, **query: object) -> None:
        raise RuntimeError("s3cret")

    monkeypatch.setattr("headgate.store.inspect.runs.RunInspection.runs", fail)
    got = client.get("/runs")
    assert got.status_code == 500
    assert "s3cret" not in got.text
    assert got.headers["content-security-policy"]
