"""A supervisor whose log a test replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.replay.live import Live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    live = Live(tmp_path / "captured")
    yield live
    live.close()
