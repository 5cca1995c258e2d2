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
from tests.proof.crash.workload import Workload
from tests.waiting import ALL_WITHIN_S


@pytest.fixture
def start_campaign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    """Starts a campaign with a workload on a database of this test; ``options`` are those of the workload."""
    with ExitStack() as stack:

        def start(
            workload: type[Workload],
            dialect: str,
            *,
            seed: int,
            subscribers: int = 0,
            complete_s_max: float = ALL_WITHIN_S,
            **options: Any,
        ) -> Campaign:
            url = str(request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[dialect]))
            folder = tmp_path / "campaign"
            folder.mkdir()
            work = workload(folder, url, subscribers, **options)
            return stack.enter_context(Campaign(work, seed=seed, complete_s_max=complete_s_max))

        yield start
