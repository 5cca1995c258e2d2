"""Campaigns for the tests of this folder; the root of the repository is where `tests.proof.crash` is found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3]))

from tests.proof.crash.campaign import Campaign


@pytest.fixture
def start_campaign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    """Starts a campaign on a database of this test."""
    with ExitStack() as stack:

        def start(dialect: str, **arguments: Any) -> Campaign:
            url = str(request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[dialect]))
            folder = tmp_path / "campaign"
            folder.mkdir()
            return stack.enter_context(Campaign(folder, url, **arguments))

        yield start
