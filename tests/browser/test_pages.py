"""The pages in a real browser: for everybody, without a word in its console, and without another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request
from tests.browser import site as sites
from tests.browser.screenshots import PAGES, paths
from tests.browser.site import Site

pytestmark = pytest.mark.browser

AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
Cookies = list[dict[str, Any]]


@pytest.fixture(scope="module")
def addresses(browser: Browser, site: Site, cookies: Cookies) -> dict[str, str]:
    """The paths of all pages."""
    context = sites.new_context(browser, cookies)
    rows = context.request.get(f"{site.base}/triggers.json").json()["rows"]
    context.close()
    return paths(next(row["id"] for row in rows if row["name"] == "fraud"))


@pytest.fixture(scope="module", params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, cookies: Cookies) -> Iterator[Page]:
    """A page of a wide window, in both colours."""
    context = sites.new_context(
        browser, cookies, viewport={"width": 1200, "height": 760}, color_scheme=request.param, reduced_motion="reduce"
    )
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def narrow(browser: Browser, cookies: Cookies) -> Iterator[Page]:
    """A page of a telephone that runs no scripts."""
    viewport = {"width": 360, "height": 640}
    context = sites.new_context(browser, cookies, viewport=viewport, java_script_enabled=False)
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_read_it_and_nothing_comes_from_elsewhere(
    page: Page, site: Site, addresses: dict[str, str], name: str
) -> None:
    said: list[str] = []
    asked: list[str] = []

    def note(message: ConsoleMessage) -> None:
        said.append(message.text)

    def ask(request: Request) -> None:
        asked.append(request.url)

    page.on("console", note)
    page.on("request", ask)
    answer = page.goto(site.base + addresses[name])
    page.remove_listener("console", note)
    assert answer is not None
    assert answer.status == (404 if name == "missing" else 200)
    # An answer of 404 is one of the page itself, which the browser tells of.
    assert [text for text in said if "404" not in text] == []
    page.evaluate(AXE.read_text())
    found = page.evaluate("rules => axe.run(document, {runOnly: rules}).then(result => result.violations)", RULES)
    page.remove_listener("request", ask)
    assert [url for url in asked if not url.startswith(f"{site.base}/")] == []
    assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found] == []


@pytest.mark.parametrize("name", PAGES)
def test_it_fits_a_telephone_and_needs_no_script(
    narrow: Page, site: Site, addresses: dict[str, str], name: str
) -> None:
    narrow.goto(site.base + addresses[name])
    wide = narrow.locator("html").evaluate("element => element.scrollWidth - element.clientWidth")
    assert wide == 0, f"{wide} px do not fit"
    assert narrow.locator("h1").inner_text()


def test_without_a_script_a_list_is_filtered_and_a_link_is_followed(narrow: Page, site: Site) -> None:
    narrow.goto(f"{site.base}/runs")
    narrow.select_option("select[name=state]", "failed")
    narrow.click("text=Show")
    assert "state=failed" in narrow.url
    narrow.click("[role=cell] a.code >> nth=0")
    assert re.search(r"/dags/shop_etl/runs/manual__", narrow.url)


def test_tab_reaches_all_in_the_order_of_the_page(browser: Browser, cookies: Cookies, site: Site) -> None:
    context = sites.new_context(browser, cookies, viewport={"width": 1200, "height": 760})
    page = context.new_page()
    page.goto(f"{site.base}/watchers")
    reachable = page.evaluate(
        "() => [...document.querySelectorAll('a[href], button, input, select')]"
        ".filter(one => one.checkVisibility()).map(one => one.outerHTML.slice(0, 120))"
    )
    reached = []
    for _ in reachable:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.outerHTML.slice(0, 120)"))
    assert reached == reachable
    context.close()


def test_keys_and_the_page_that_lives(browser: Browser, cookies: Cookies, site: Site) -> None:
    context = sites.new_context(browser, cookies)
    page = context.new_page()
    page.goto(site.base)
    with page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true") as answered:
        pass
    assert answered.value.status == 200
    page.keyboard.press("p")
    assert page.locator("#pause").inner_text() == "Go on"
    page.keyboard.press("/")
    page.keyboard.type("big-orders berlin:79")
    page.keyboard.press("Enter")
    page.wait_for_url("**/events/**", wait_until="domcontentloaded")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/streams")
    context.close()


@pytest.mark.parametrize(
    ("clicks", "shown"),
    [
        ([".side >> text=Streams", "a.code:has-text('filelog')"], "12,408"),
        (["#live .problems li:has-text('dead letters') >> text=Show", "[role=cell] a.code >> nth=-1"], "berlin:4711"),
        (["#live .problems li:has-text('runs failed') >> text=Show", "[role=cell] a.code >> nth=0"], "KeyError"),
        ([".side >> text=Supervisors"], "30 of 30, full"),
        (["#live a.code:has-text('filelog')", "[role=cell] a:has-text('fraud')"], "ConnectionRefusedError"),
    ],
    ids=[
        "what holds a stream up",
        "a poison message",
        "a run that failed",
        "a supervisor that is full",
        "a watcher that is behind",
    ],
)
def test_what_is_wrong_is_within_three_clicks(
    browser: Browser, cookies: Cookies, site: Site, clicks: list[str], shown: str
) -> None:
    context = sites.new_context(browser, cookies, java_script_enabled=False)
    page = context.new_page()
    page.goto(site.base)
    for click in clicks:
        page.click(click)
    assert shown in page.locator("main").inner_text()
    context.close()


def test_a_letter_is_edited_and_the_own_account_is_found_without_a_script(
    browser: Browser, cookies: Cookies, site: Site
) -> None:
    context = sites.new_context(browser, cookies, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site.base}/dead-letters/1")
    assert '"amount":1800' in page.input_value("textarea").replace(" ", "")
    page.fill("textarea", '{"order": 4711, "amount": 1801}')
    page.click("text=Edit what a redrive stores")
    assert "1801" in page.locator("main").inner_text()
    assert "dlq edit" in page.locator(".said >> nth=0").inner_text()
    page.click(".foot a")
    assert "this browser" in page.locator("main").inner_text()
    context.close()
