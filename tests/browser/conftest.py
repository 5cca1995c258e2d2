"""One server and one browser for all tests of this folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.browser import site as sites
from tests.browser.site import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A server on the lively database."""
    with tempfile.TemporaryDirectory(prefix="headgate-browser-") as folder, sites.serving(Path(folder)) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; without one the tests are skipped, but never where ``CI`` is set."""
    program = sites.chromium()
    if program is None:
        message = "there is no chromium: apt-get install --no-install-recommends chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sites.browsing(program) as started:
        yield started


@pytest.fixture(scope="module")
def cookies(browser: Browser, site: Site) -> list[dict[str, Any]]:
    """What a browser has that has logged in."""
    return sites.log_in(browser, site)
