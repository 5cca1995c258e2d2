"""``make screenshots``: pictures of pages of a lively database, for the documents; or of all pages, into a folder.

::

    python -m tests.browser.screenshots [--all FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser
from tests.browser import site as sites
from tests.browser.site import Site

IMAGES = Path(__file__).parents[2] / "docs" / "images"
RUN = "/dags/shop_etl/runs/manual__2026-11-25T16:00:00+00:00"
IN_DOCUMENTS = {"overview": "/", "run": RUN, "streams": "/streams"}
BYTES_MAX = 150 * 1024
WIDTH, HEIGHT = 1200, 760

# Every page, with a row that has something to show.
PAGES = {
    "overview": "/",
    "streams": "/streams",
    "stream": "/streams/1",
    "watchers": "/watchers",
    "triggers": "/triggers",
    "trigger": "/triggers/{fraud}",
    "events": "/events",
    "event": "/events/1",
    "letters": "/dead-letters",
    "letter": "/dead-letters/1",
    "assets": "/assets",
    "asset": "/assets/1",
    "signals": "/signals",
    "signal": "/signals/1",
    "dags": "/dags",
    "dag": "/dags/shop_etl",
    "graph": "/dags/shop_etl/graph",
    "runs": "/runs",
    "run": RUN,
    "task": f"{RUN}/tasks/check",
    "log": f"{RUN}/tasks/check/log",
    "pools": "/pools",
    "supervisors": "/supervisors",
    "search": "/search?q=r",
    "audit": "/audit",
    "account": "/account",
    "help": "/help",
    "empty": "/runs?state=queued",
    "missing": "/dags/none",
}


def paths(fraud: int) -> dict[str, str]:
    """Return the paths of `PAGES`."""
    return {name: path.format(fraud=fraud) for name, path in PAGES.items()}


def main() -> int:
    """Take the pictures; return 1 if one of the documents is too large."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots")
    parser.add_argument("--all", metavar="FOLDER", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    program = sites.chromium()
    if program is None:
        parser.error("there is no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="headgate-pages-") as folder, sites.serving(Path(folder)) as site:
        with sites.browsing(program) as browser:
            if given.all is not None:
                _all(browser, site, given.all, given.only)
                return 0
            return _documents(browser, site)


def _documents(browser: Browser, site: Site) -> int:
    context = sites.new_context(
        browser, sites.log_in(browser, site), viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
    )
    page = context.new_page()
    too_large = 0
    for name, path in IN_DOCUMENTS.items():
        page.goto(site.base + path)
        file = IMAGES / f"{name}.png"
        page.screenshot(path=file)
        too_large += file.stat().st_size > BYTES_MAX
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
    return min(too_large, 1)


def _all(browser: Browser, site: Site, folder: Path, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cookies = sites.log_in(browser, site)
    looks = {"light": (WIDTH, "light"), "dark": (WIDTH, "dark"), "narrow": (390, "light")}
    for look, (width, scheme) in looks.items():
        context = sites.new_context(browser, cookies, viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
        page = context.new_page()
        (fraud,) = (
            row["id"] for row in page.request.get(f"{site.base}/triggers.json").json()["rows"] if row["name"] == "fraud"
        )
        for name, path in paths(fraud).items():
            if only in name:
                page.goto(site.base + path)
                page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
        context.close()


if __name__ == "__main__":
    sys.exit(main())
