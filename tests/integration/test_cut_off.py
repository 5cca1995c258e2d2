"""A real ``headgate triggerer`` that cannot reach its database any more, while its broker can still be reached."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from tests.brokers.servers.nats import own_nats
from tests.integration.conftest import StartPair
from tests.integration.pair import stored
from tests.waiting import WITHIN_S, wait_until

from headgate.store.store import Store
from headgate.supervisor.commands import EXIT_CUT_OFF
from headgate.testing.brokers.nats_station import NatsStation
from headgate.testing.brokers.reading import names

SETTINGS = {"heartbeat_s": "0.2", "poll_interval_s": "0.5", "lease_silence_max_s": "2", "cut_off_exit_s": "3"}
MESSAGES = 20

pytestmark = pytest.mark.campaign


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsStation]:
    (tmp_path / "broker").mkdir()
    with own_nats(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def role(users_store: Store) -> Iterator[str]:
    """A role of PostgreSQL that one supervisor alone uses, so that it alone can be shut out."""
    name = f"headgate_cut_off_{secrets.token_hex(4)}"
    execute(users_store, f"CREATE ROLE {name} LOGIN SUPERUSER")
    yield name
    shut_out(users_store, name)
    execute(users_store, f"DROP ROLE {name}")


def execute(store: Store, statement: str) -> None:
    with store.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))


def shut_out(store: Store, role: str) -> None:
    execute(store, f"ALTER ROLE {role} NOLOGIN")
    execute(store, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_what_a_broker_has_handed_to_one_that_is_cut_off_is_stored_by_another(
    nats: NatsStation, role: str, start_pair: StartPair, users_store: Store, database_url: str
) -> None:
    settings = SETTINGS | {"conn_shop": nats.uri}
    trigger = nats.trigger()
    users_store.add_watcher("orders", type(trigger)._classpath(), trigger.serialize()[1] | {"connection": "shop"})
    url = make_url(database_url).set(username=role).render_as_string(hide_password=False)
    cut_off = start_pair(**settings, database_url=url)
    cut_off.wait_ready()
    nats.publish(names(1))
    wait_until(lambda: stored(users_store) == 1, "the stream is read")
    shut_out(users_store, role)
    nats.publish(names(MESSAGES, 1))
    start_pair(**settings).wait_log("took over from supervisors that are gone")
    cut_off.wait_log("the lease could not be renewed for cut_off_exit_s; stopping", level="error")
    assert cut_off.process.wait(WITHIN_S) == EXIT_CUT_OFF
    wait_until(lambda: stored(users_store) == 1 + MESSAGES, "the other supervisor has stored them")
    wait_until(lambda: not nats.pending(), "they are acknowledged")
    assert stored(users_store) == 1 + MESSAGES
