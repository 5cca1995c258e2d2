"""Real pairs for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from cryptography.fernet import Fernet

from headgate.store.engine import open_engine
from headgate.store.secrets import Secrets
from headgate.store.store import Store

sys.path.append(str(Path(__file__).parent))

from pair import Pair


class StartPair(Protocol):
    """Starts a pair on the test's database; settings are given by name."""

    def __call__(self, *arguments: str, **settings: str) -> Pair: ...


@pytest.fixture(scope="session")
def keys() -> str:
    return Fernet.generate_key().decode()


@pytest.fixture
def users_store(database_url: str, keys: str) -> Iterator[Store]:
    """The database as the command line sees it: what a user adds and looks at."""
    with Store(open_engine(database_url), secrets=Secrets([keys], source="the tests")) as store:
        yield store


@pytest.fixture
def start_pair(database_url: str, keys: str, tmp_path: Path) -> Iterator[StartPair]:
    pairs: list[Pair] = []

    def start(*arguments: str, **settings: str) -> Pair:
        pair = Pair(tmp_path, database_url, keys, arguments, settings)
        pairs.append(pair)
        return pair

    yield start
    for pair in pairs:
        pair.close()
