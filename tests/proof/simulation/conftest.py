"""The simulation is a package of its own, imported by its whole name, wherever pytest was started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    """What the pair logs about injected faults says nothing here; loggers of other tests are left as they are."""
    before = structlog.get_config()
    from tests.proof.simulation.judging import name_of_logger

    structlog.configure(processors=[_drop], logger_factory=name_of_logger)
    yield
    structlog.configure(**before)


def _drop(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    from tests.proof.simulation.judging import note_unforeseen

    note_unforeseen(logger, event.get("event"), event.get("exc_info"))
    raise structlog.DropEvent
