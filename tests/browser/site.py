"""``headgate web`` as a process of its own, on the lively database, and a browser that has opened its link."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from cryptography.fernet import Fernet
from playwright.sync_api import Browser, BrowserContext, sync_playwright
from tests.browser.lively import Lively
from tests.store.harness import migrated_sqlite

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAITED_MAX_MS = 60_000  # for what must come, however busy the machine is


class Site(NamedTuple):
    """A server, the link that logs in, and the folder of what it shows."""

    base: str
    link: str


def chromium() -> str | None:
    """Return the path of a browser of this machine; None if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Site]:
    """Fill a database in a folder, and serve its pages."""
    path = folder / "headgate.db"
    path.write_bytes(migrated_sqlite())
    url = f"sqlite:///{path}"
    Lively(url, Fernet.generate_key().decode(), folder / "logs").fill()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    kept |= {"HEADGATE_HOME": str(folder), "HEADGATE_DATABASE_URL": url, "HEADGATE_LOG_FOLDER": str(folder / "logs")}
    command = [sys.executable, "-m", "headgate.cli", "web", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=kept, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            found = re.search(r"(http://[^/\s]+)(/\S+)", line)
            assert found is not None, "the server has ended"
            yield Site(found[1], found[0])
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def browsing(program: str) -> Generator[Browser]:
    """Start a browser without a window."""
    with sync_playwright() as playwright:
        # Its sandbox needs a user other than root, and rights that containers do not give.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def log_in(browser: Browser, site: Site) -> list[dict[str, object]]:
    """Open the link, which can be opened once; return the cookies, which other contexts may be given."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAITED_MAX_MS)
    page.goto(site.link)
    cookies = [dict(cookie) for cookie in context.cookies()]
    context.close()
    return cookies


def new_context(browser: Browser, cookies: list[dict[str, object]], **options: object) -> BrowserContext:
    """Return a context that is logged in."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(WAITED_MAX_MS)
    context.add_cookies(cookies)  # type: ignore[arg-type]
    return context
