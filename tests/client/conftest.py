"""Fixtures of clients and consumers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.client.harness import BILLS, Watched, client_of

from headgate.client import Client
from headgate.store.store import Store


@pytest.fixture
def watched(store: Store) -> Iterator[Watched]:
    """A watcher, beside a table of the user's."""
    BILLS.metadata.create_all(store.database.engine)
    yield Watched(store)
    BILLS.metadata.drop_all(store.database.engine)


@pytest.fixture
def client(watched: Watched) -> Iterator[Client]:
    with client_of(watched.store) as client:
        yield client
