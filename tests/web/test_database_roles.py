"""The roles of PostgreSQL that `headgate db roles` makes, each by a process that has really connected as it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from benchmarks.filling import Filled, fill
from sqlalchemy import Engine, insert, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError
from tests.cli.test_audit import refuse
from tests.client.harness import BILLS, Watched, bills, payloads
from tests.supervisor.tasks_harness import Tasks, task_states
from tests.web.test_plans import SIZES, Listened, listening

from benchmarks import bench_web
from headgate.client import Send, open_client
from headgate.store.access import roles
from headgate.store.access.audit import Actor
from headgate.store.access.tables import SECRETS
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import StoreError
from headgate.store.signals import sending
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tables import metadata


@pytest.fixture
def database_url(make_migrated_postgres_url: Callable[[], str]) -> str:
    """A database whose tables get another owner, so one of the test's own."""
    return make_migrated_postgres_url()


def url_of(database_url: str, role: str) -> str:
    """The URL with which a process connects as a role, to which `engines` gives the password."""
    return make_url(database_url).set(username=role, password="of tests").render_as_string(hide_password=False)


@pytest.fixture
def engines(database_url: str, store: Store) -> Iterator[dict[str, Engine]]:
    """Engines that connect as each role; the roles are of the whole server, and stay."""
    with store.database.engine.connect() as superuser:
        for statement in roles.statements():
            superuser.exec_driver_sql(statement)
        for role in roles.ROLES:
            superuser.exec_driver_sql(f"ALTER ROLE {role} LOGIN PASSWORD 'of tests'")
        superuser.commit()
    of = {role: open_engine(url_of(database_url, role)) for role in roles.ROLES}
    yield of
    for engine in of.values():
        engine.dispose()


def is_refused(engine: Engine, statement: str) -> bool:
    with engine.connect() as connection:
        try:
            connection.execute(text(statement))
        except ProgrammingError as error:
            return "permission denied" in str(error)
    return False


def test_each_role_may_do_what_its_process_does_and_no_more(engines: dict[str, Engine], etl: Tasks) -> None:
    store = etl.store
    trigger_id = store.add_watcher("w", "a.B", {"password": "s3cret"})
    store.claim_triggers(etl.epoch, limit=1, queues=("default",))
    letters = refuse(etl, trigger_id, 3)
    secrets = [(table, column) for table, columns in SECRETS.items() for column in columns]
    for role in (roles.WEB, roles.READER):
        for table, column in secrets:
            assert is_refused(engines[role], f'SELECT "{column}" FROM "{table}"'), (role, table)
        for table in ("variable", "connection", "web_user"):
            assert is_refused(engines[role], f"DELETE FROM {table}"), (role, table)
        assert is_refused(engines[role], "DELETE FROM audit")
        for statement in ("UPDATE trigger SET classpath = 'os.system'", "UPDATE dag SET spec = ''", "DELETE FROM dag"):
            assert is_refused(engines[role], statement), (role, statement)
    assert is_refused(engines[roles.READER], "UPDATE dag SET is_paused = true")
    assert is_refused(engines[roles.READER], "SELECT password FROM web_user")
    for table in roles.OF_USERS:
        assert is_refused(engines[roles.SUPERVISOR], f"SELECT * FROM {table}")
    for table in metadata.tables:
        assert not is_refused(engines[roles.OWNER], f'SELECT * FROM "{table}"'), table

    for role in (roles.READER, roles.WEB):
        with Store(engines[role], secrets=Secrets.none()) as looks:
            looks.inspect.status()
            looks.inspect.why_trigger(trigger_id)
            looks.inspect.trigger_line(trigger_id)
            looks.inspect.why_task(looks.inspect.find_task("etl", "r1", "a"))
            assert len(looks.inspect.dead_letters()) == 3
            with pytest.raises(StoreError, match="permission denied"):
                looks.inspect.trigger_kwargs(trigger_id)
    with Store(engines[roles.WEB], secrets=Secrets.none(), actor=Actor("ada", "admin", "web")) as acts:
        acts.tasks.set_paused("etl", is_paused=True)
        acts.tasks.create_run("etl", "mine")
        acts.tasks.mark(acts.inspect.find_task("etl", "r1", "a").id, "failed")
        acts.tasks.clear_many(etl.run)
        assert task_states(store, etl.run)["a"].value == "none"
        acts.tasks.cancel_run(etl.run)
        acts.pause_watcher("w")
        acts.resume_watcher("w")
        acts.restart_watcher("w")
        acts.letters.edit(letters[0], b"1", by="ada")
        acts.letters.redrive(letters[0], by="ada")
        acts.letters.discard(letters[1], by="ada")
        acts.letters.discard(letters[2], by="ada")  # in the same row of the audit
        acts.tasks.set_pool("wide", 4)
        acts.tasks.delete_pool("wide")
        acts.signals.ask(acts.inspect.find_task("etl", "r1", "b").id, "START")
        acts.signals.send([NewSignal("k", b"1", "d", "ada")])
        acts.signals.forget("k")
        acts.remove_watcher("w")
    with Store(engines[roles.OWNER], secrets=Secrets.none(), actor=Actor("ada", "admin", "cli")) as owns:
        password = owns.access.add_user("eve", "viewer")
    with Store(engines[roles.WEB], secrets=Secrets.none(), actor=Actor("eve", "nobody", "web")) as pages:
        logged_in = pages.access.log_in("eve", password, "127.0.0.1")
        assert logged_in is not None
        session, browser = logged_in
        found = pages.access.session(session)
        assert found is not None
        assert found[0].role == "viewer"
        assert pages.access.change_password("eve", password, "a better password", "127.0.0.1", browser, session)
        assert len(pages.access.own_sessions(session)) == 1
        pages.access.end_own_sessions("eve", session)
        pages.access.note_refusal("dags pause", "/act/dags-pause", 1, None)
    with Store(engines[roles.SUPERVISOR], secrets=store.database.secrets) as runs:
        runs.scheduling.plan(etl.epoch)
        runs.add_watcher("w2", "a.B", {})


def test_a_program_needs_no_more_than_its_role_to_consume(
    engines: dict[str, Engine], store: Store, database_url: str
) -> None:
    watched = Watched(store)
    watched.store_events("a", "b", "bad", "c")
    with store.database.engine.begin() as superuser:
        BILLS.metadata.create_all(superuser)
        superuser.exec_driver_sql(f"GRANT SELECT, INSERT ON {BILLS.name} TO {roles.CONSUMER}")
    with open_client(url_of(database_url, roles.CONSUMER)) as client:
        assert payloads(client.follow("orders", idle_s=0.0)) == ["a", "b", "bad", "c"]
        assert client.events("orders", after=client.newest("orders")) == []
        consumer = client.add_consumer("billing", "orders", max_deliveries=1)
        is_mended = False

        def bill() -> None:
            with suppress(ValueError), consumer.batch(3) as batch:
                for event in batch:
                    if event.payload == "bad" and not is_mended:
                        raise ValueError(event.payload)
                    batch.connection.execute(insert(BILLS).values(event_id=event.id, payload=event.payload))

        while consumer.wait(timeout_s=0.0):
            bill()
        assert bills(watched) == ["a", "b", "c"]
        with Store(engines[roles.CONSUMER], secrets=Secrets.none()) as verbs:
            (letter,) = verbs.consumers.letters("billing")
            verbs.consumers.redeliver("billing", letter.event_id)
            assert consumer.wait(timeout_s=0.0)
            bill()  # and fails again
            is_mended = True
            verbs.consumers.redeliver("billing", letter.event_id)
            assert consumer.wait(timeout_s=0.0)
            bill()
        assert bills(watched) == ["a", "b", "bad", "c"]
        assert client.consumer("billing").name == "billing"
        client.remove_consumer("billing")


def test_a_program_needs_no_more_than_its_role_to_send(
    engines: dict[str, Engine], etl: Tasks, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "VERSIONS_KEPT_MAX", 2)
    with open_client(url_of(database_url, roles.CONSUMER)) as client:
        assert client.send_signal("k", 1).version == 1
        client.send_signal("k", 2, run=("etl", "r1"))
        client.send_signal("k", 3)
        assert [one.value for one in client.listen_signal("k", after=0, idle_s=0.0)] == [2, 3]
        assert client.send_and_start("etl", [Send("k", 4)])[1] is None
        etl.store.tasks.cancel_run(etl.run)
        _, run_id = client.send_and_start("etl", [Send("k", 5)])
        assert run_id is not None
    for statement in (
        "DELETE FROM variable",
        "DELETE FROM trigger_event",
        "UPDATE trigger SET queue = 'x'",
        "UPDATE dag SET spec = ''",
        "UPDATE dag SET is_paused = true",
        "UPDATE task_instance SET state = 'success'",
        "INSERT INTO audit DEFAULT VALUES",
        "SELECT kwargs FROM trigger",
        "SELECT * FROM web_user",
    ):
        assert is_refused(engines[roles.CONSUMER], statement), statement


@pytest.mark.parametrize("role", roles.ROLES[1:])
def test_tables_of_users_keep_their_rights(engines: dict[str, Engine], store: Store, role: str) -> None:
    with store.database.engine.begin() as superuser:
        BILLS.metadata.create_all(superuser)
        superuser.exec_driver_sql(f"GRANT SELECT ON {BILLS.name} TO {role}")
        superuser.exec_driver_sql(f"GRANT DELETE ON {roles.REVISION_TABLE} TO {role}")
        for statement in roles.statements():  # as after an upgrade
            superuser.exec_driver_sql(statement)
    assert not is_refused(engines[role], f"SELECT * FROM {BILLS.name}")
    assert is_refused(engines[role], f"DELETE FROM {roles.REVISION_TABLE}")


@pytest.mark.parametrize("role", [roles.READER, roles.WEB])
def test_no_page_asks_for_what_its_role_may_not_read(
    engines: dict[str, Engine], store: Store, database_url: str, role: str
) -> None:
    epoch, busy = fill(store, SIZES)
    found = Listened({}, Counter())
    bench_web.ask(
        Filled(store, epoch, busy, store.database.engine, database_url), 1, around=lambda path: listening(path, found)
    )
    refused = set()
    with engines[role].connect() as connection:
        for (path, statement), parameters in found.statements.items():
            try:
                connection.exec_driver_sql(statement, parameters)
            except ProgrammingError as error:
                connection.rollback()
                if "permission denied" in str(error) and not any(table in statement for table in roles.OF_USERS):
                    refused.add(f"{path}: {error}")
    assert refused == set()
