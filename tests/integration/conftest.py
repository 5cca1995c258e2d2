"""Real pairs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from cryptography.fernet import Fernet
from tests.integration.pair import Pair
from tests.integration.station import Station
from tests.store.harness import migrated_sqlite

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store


class StartStation(Protocol):
    """Starts a ``headgate up`` on the test's database; settings are given by name."""

    def __call__(self, *arguments: str, home: Path | None = None, **settings: str) -> Station: ...


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


# Short waits where a test would wait for them; all others are as users have them.
STATION_SETTINGS = {"dags_look_s": "0.1", "workers": "4", "heartbeat_s": "0.5"}


@pytest.fixture
def start_station(database_url: str, keys: str, users_store: Store, tmp_path: Path) -> Iterator[StartStation]:
    stations: list[Station] = []

    def start(*arguments: str, home: Path | None = None, **settings: str) -> Station:
        settings = STATION_SETTINGS | settings
        station = Station(home or tmp_path, database_url, keys, users_store, arguments, settings)
        stations.append(station)
        return station

    yield start
    for station in stations:
        station.close()


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def station(request: pytest.FixtureRequest, keys: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """The ``headgate up`` that tests share: each has runs of its own in it, and none ends it."""
    home = tmp_path_factory.mktemp("station")
    if request.param == "postgresql":
        url = request.getfixturevalue("make_migrated_postgres_url")()
    else:
        (home / "headgate.db").write_bytes(migrated_sqlite())
        url = f"sqlite:///{home}/headgate.db"
    with Store(open_engine(url), secrets=Secrets([keys], source="the tests")) as store:
        shared = Station(home, url, keys, store, (), STATION_SETTINGS)
        yield shared
        shared.close()
