"""A table on a private server: what rows become, in which order, who reads it, and when rows go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.brokers.servers.absent import skip_or_fail
from tests.brokers.servers.certificates import Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients import postgres_client
from headgate.brokers.clients.postgres_client import PostgresClient, PostgresPasses
from headgate.brokers.postgres import PostgresOutboxProducer, PostgresOutboxTrigger
from headgate.brokers.threaded import Received
from headgate.protocol.values import decode_value
from headgate.testing.brokers.postgres_server import USER, why_none
from headgate.testing.brokers.postgres_station import PASSWORD, PostgresAckParser, PostgresStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, wait_until
from headgate.triggers.named_values import Connection
from headgate.triggers.shared_stream import Undecodable

ALL_HANDLED = "everything is acknowledged"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresStation]:
    if problem := why_none():
        skip_or_fail(problem)
    server = PostgresStation()
    yield server
    server.close()


@pytest.fixture
def station(server: PostgresStation) -> PostgresStation:
    """The server of all these tests, with a new table."""
    server.source.rows("DROP TABLE IF EXISTS orders, orders_rejected CASCADE")
    server.create()
    return server


@contextmanager
def connected(station: PostgresStation, **kwargs: Any) -> Iterator[PostgresOutboxProducer]:
    producer = PostgresOutboxProducer(CONNECTION, **{"table": station.table, **kwargs})
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    try:
        producer.connect()
        yield producer
    finally:
        producer.disconnect()


def events(station: PostgresStation, count: int, **kwargs: Any) -> list[Any]:
    """Return the raw events of the rows that are there."""
    found: list[Received] = []

    def are_found() -> bool:
        try:
            with connected(station, **kwargs) as producer:
                found.extend(producer.receive(count, 0))
        except PostgresPasses:  # the server may not have noticed yet that the reader before has left
            return False
        return True

    wait_until(are_found, "nobody else reads the table")
    assert len(found) == count
    return [message.raw_event for message in found]


# --- what rows become ---------------------------------------------------------------------------------


def test_the_event_is_the_row_or_one_of_its_columns(station: PostgresStation) -> None:
    station.source.rows('INSERT INTO orders (payload, kind) VALUES (\'{"name": "Åsa", "price": 1.5}\', \'paid\')')
    payload = {"name": "Åsa", "price": 1.5}
    row = {"id": 1, "payload": payload, "kind": "paid", "done_at": None}
    with Reading(station.trigger(), uri=station.uri) as read:
        wait_until(read.payloads, "it is stored")
        assert [decode_value(each) for each in read.payloads()] == [{"id": "1", "table": "orders", "row": row}]
        wait_until(lambda: not station.pending(), ALL_HANDLED)
    station.source.rows('INSERT INTO orders (payload, kind) VALUES (\'{"name": "Åsa", "price": 1.5}\', \'[1]\')')
    assert events(station, 1, body="json:payload") == [payload]
    assert events(station, 1, body="json:kind") == [[1]]


def test_a_column_that_is_not_json_is_undecodable_and_whole(station: PostgresStation) -> None:
    station.source.rows("ALTER TABLE orders ADD raw bytea")
    station.source.rows("INSERT INTO orders (raw, kind) VALUES ('\\xff', 'x%%'), ('[7]', NULL)")
    assert events(station, 2, body="json:raw") == [
        Undecodable("the body is not UTF-8: invalid start byte", b"\xff"),
        [7],
    ]
    of_texts = events(station, 2, body="json:kind")
    assert [(event.content, event.is_whole) for event in of_texts] == [(b"x%", True), ("id 2", True)]


def test_names_and_conditions_may_have_any_characters(station: PostgresStation) -> None:
    station.source.rows('DROP SCHEMA IF EXISTS "Shop %%s" CASCADE', x=1)
    station.source.rows('CREATE SCHEMA "Shop %%s"', x=1)
    name = '"Shop %s"."Or""ders"'
    station.source.rows(f'CREATE TABLE {name.replace("%", "%%")} ("The id" text PRIMARY KEY, "a%%(ids)s" text)', x=1)
    station.source.rows(
        f"INSERT INTO {name.replace('%', '%%')} VALUES ('a,\"{{}}', '50%%'), ('b', '50'), ('c', NULL)", x=1
    )
    kwargs = {"table": name, "id": "The id", "lane": "column:a%(ids)s", "where": "\"a%(ids)s\" LIKE '%5%' -- %s"}
    with connected(station, **kwargs) as producer:
        found = list(producer.receive(10, 0))
        assert [(message.ref.id, message.lane) for message in found] == [('a,"{}', "50%"), ("b", "50")]
        assert producer.lag() == 2
        producer.acknowledge(found)
        assert producer.lag() == 0


# --- in which order, and which again ------------------------------------------------------------------


def test_a_row_of_a_slow_transaction_is_read_although_its_id_was_passed(station: PostgresStation) -> None:
    with Reading(station.trigger(), uri=station.uri) as read:
        station.source.rows("BEGIN")
        station.publish(names(1))
        late, station.source._client = station.source._client, None
        assert late is not None
        station.publish(names(5, 1))
        read.wait_stored(names(5, 1))
        late.rows("COMMIT")
        late.close()
        read.wait_stored(names(6))
        wait_until(lambda: not station.pending(), ALL_HANDLED)


def test_a_row_that_is_changed_while_it_is_held_is_another_message(station: PostgresStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(2))
        station.source.rows('UPDATE orders SET payload = \'{"message": "message-000009"}\' WHERE id = 1')
        read.confirm()
        read.wait_stored([*names(2), "message-000009"])
        wait_until(lambda: not station.pending(), ALL_HANDLED)


def test_many_rows_are_read_in_the_order_of_their_ids(station: PostgresStation) -> None:
    station.publish(names(1_000))
    with Reading(station.trigger(in_flight_max=64), uri=station.uri) as read:
        read.wait_stored(names(1_000))
        assert read.order() == names(1_000)
        wait_until(lambda: not station.pending(), ALL_HANDLED)


def test_a_notification_ends_the_wait(station: PostgresStation) -> None:
    with connected(station, notify="New orders") as producer:
        assert producer.receive(10, 0) == []
        producer._look_at = float("inf")
        station.publish(names(1))
        station.source.rows('NOTIFY "New orders"')
        assert len(producer.receive(10, 60)) == 1


# --- when rows go -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "kind"), [("done_at", ""), ("is_done", "boolean"), ("done_on", "date")])
def test_a_row_may_be_marked_and_not_deleted(station: PostgresStation, column: str, kind: str) -> None:
    if kind:
        station.source.rows(f"ALTER TABLE orders ADD {column} {kind}")
    station.publish(names(3))
    unmarked = f"SELECT id FROM orders WHERE {column} IS NULL"
    with Reading(station.trigger(then=f"set:{column}"), uri=station.uri) as read:
        read.wait_stored(names(3))
        wait_until(lambda: not station.source.rows(unmarked), ALL_HANDLED)
        station.publish(names(1, 3))
        read.wait_stored(names(4))
        wait_until(lambda: not station.source.rows(unmarked), ALL_HANDLED)
        assert sum(read.stored().values()) == 4
    assert len(station.pending()) == 4


def test_a_row_that_others_have_locked_goes_later_and_holds_up_no_other(station: PostgresStation) -> None:
    station.publish(names(5))
    locker = PostgresClient(Connection.from_uri("locker", station.uri), "locks")
    locker.rows("BEGIN")
    locker.rows("SELECT FROM orders WHERE id = 2 FOR UPDATE")
    try:
        with Reading(station.trigger(), uri=station.uri) as read:
            read.wait_stored(names(5))
            wait_until(lambda: len(station.pending()) == 1, "the others are acknowledged")
            locker.rows("ROLLBACK")
            wait_until(lambda: not station.pending(), ALL_HANDLED)
            assert read.stored() == dict.fromkeys(names(5), 1)
    finally:
        locker.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("CREATE TRIGGER keep BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION keep()", "a rule or a trigger"),
        ("CREATE RULE keep AS ON DELETE TO orders DO INSTEAD NOTHING", "DELETE RETURNING"),
    ],
)
def test_a_table_that_keeps_its_rows_ends_the_stream(station: PostgresStation, statement: str, problem: str) -> None:
    keep = "CREATE OR REPLACE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    station.source.rows(keep)
    station.source.rows(statement)
    station.publish(names(3))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert problem in str(failure)


def test_a_row_whose_rejection_had_no_answer_is_put_aside_once(station: PostgresStation) -> None:
    station.publish(names(3))
    with connected(station, **station.with_place()) as producer:
        messages = list(producer.receive(3, 0))
        producer.reject(messages[:2])
        producer.reject(messages)  # as after a connection that was lost before the answer to the first two
    assert sorted(names(3)) == sorted(name for row in station.in_place() for name in names(3) if name in row)
    assert not station.pending()


def test_a_row_that_was_put_back_and_is_rejected_again_is_put_aside_again(station: PostgresStation) -> None:
    station.source.rows("CREATE TABLE orders_rejected (LIKE orders, at bigint GENERATED ALWAYS AS IDENTITY UNIQUE)")
    with connected(station, dead_letter="orders_rejected") as producer:
        for name in names(2):
            station.source.rows(f'INSERT INTO orders (id, payload) VALUES (7, \'{{"message": "{name}"}}\')')
            producer._look_at = 0.0
            producer.reject(producer.receive(10, 0))
            assert not station.pending()
    assert [name in row for row, name in zip(station.in_place(), names(2), strict=True)] == [True, True]


@pytest.mark.parametrize(
    "key",
    [
        "LIKE orders INCLUDING ALL",
        "LIKE orders, UNIQUE (id) INCLUDE (own)",
        "LIKE orders, UNIQUE (twice)",
        "LIKE orders, EXCLUDE (id WITH =)",
    ],
)
def test_a_place_that_could_not_take_a_row_twice_is_refused(station: PostgresStation, key: str) -> None:
    columns = "own serial, twice bigint GENERATED ALWAYS AS (id * 2) STORED"
    station.source.rows(f"CREATE TABLE orders_rejected ({columns}, {key})")
    with (
        pytest.raises(BrokerMisconfigured, match="dead_letter orders_rejected has the unique key orders_rejected_"),
        connected(station, dead_letter="orders_rejected"),
    ):
        pass


def test_a_constraint_that_stands_against_an_outcome_is_named_and_no_row_is_shown(station: PostgresStation) -> None:
    place = station.with_place()
    station.publish(names(2))
    with connected(station, **place) as producer:
        messages = list(producer.receive(10, 0))
        station.source.rows("CREATE UNIQUE INDEX once ON orders_rejected ((0))")
        with pytest.raises(BrokerMisconfigured, match=r'of the table orders_rejected .* unique constraint "once"'):
            producer.reject(messages)
        station.source.rows("CREATE TABLE lines (of bigint CONSTRAINT belongs REFERENCES orders)")
        station.source.rows("INSERT INTO lines VALUES (1)")
        with pytest.raises(BrokerMisconfigured, match='"belongs" on table "lines"') as refused:
            producer.acknowledge(messages)
        station.source.rows("DROP TABLE lines")
    assert "(id)" not in str(refused.value)
    assert len(station.pending()) == 2


# --- who reads ----------------------------------------------------------------------------------------


def test_of_two_readers_of_one_name_the_second_waits_until_the_first_has_left(station: PostgresStation) -> None:
    station.publish(names(3))
    with connected(station) as first, connected(station) as second:
        held = list(first.receive(10, 0))
        assert len(held) == 3
        with pytest.raises(PostgresPasses, match=r"another session reads the table as 'headgate' \(process \d+ of 127"):
            second.receive(10, 0)
        with connected(station, reader="another") as other:
            assert len(other.receive(10, 0)) == 3
        with pytest.raises(PostgresPasses, match="another session"):
            second.acknowledge(held)
        first.disconnect()
        wait_until(lambda: _takes_over(second), "it reads")
    assert len(station.pending()) == 3


def _takes_over(producer: PostgresOutboxProducer) -> bool:
    try:
        return len(producer.receive(10, 0)) == 3
    except PostgresPasses:
        return False


def test_a_check_takes_neither_the_lock_nor_rows(station: PostgresStation) -> None:
    station.publish(names(3))
    with connected(station) as producer:
        assert len(producer.receive(10, 0)) == 3
        checked = station.trigger().check(station.uri)
        assert (checked.name, checked.problem, checked.lag) == ("postgresql table orders", "", 3)
        assert checked.warnings == (
            "the server does not sync its files (fsync=off): a crash of its machine loses rows",
        )


def test_a_session_that_is_not_the_one_with_the_lock_deletes_nothing(station: PostgresStation) -> None:
    station.publish(names(3))
    with connected(station) as producer:
        held = list(producer.receive(10, 0))
        producer._db.rows("RESET headgate.reader")  # as another session, to which a pooler gives the statement, has it
        with pytest.raises(BrokerMisconfigured, match="a pooler must pool by session"):
            producer.acknowledge(held)
    assert len(station.pending()) == 3


def test_a_table_that_is_made_anew_while_it_is_read_is_another_one(station: PostgresStation) -> None:
    station.publish(names(2))
    with connected(station) as producer:
        assert len(producer.receive(10, 0)) == 2
        station.delete()
        station.create()
        station.publish(names(3))
        producer._look_at = 0.0
        with pytest.raises(BrokerMisconfigured, match="does not exist any more"):
            producer.receive(10, 0)
        producer.disconnect()
        with pytest.raises(BrokerMisconfigured, match="does not exist any more"):
            producer.connect()


def test_a_server_that_hangs_is_left(station: PostgresStation, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(station) as producer:
        assert producer.receive(10, 0) == []
        monkeypatch.setattr(postgres_client, "ANSWER_S", 0.05)
        station.tap.stall()
        try:
            with pytest.raises(PostgresPasses, match=r"has not answered for 0\.05 s"):
                producer.lag()
        finally:
            station.tap.flow()


# --- arguments, and the tap ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"table": ""}, r"table must have 1\.\.256 printable characters"),
        ({"body": "payload"}, 'body must be "row" or "json:FIELD"'),
        ({"lane": "kind"}, 'lane must be "table", "message" or "column:FIELD"'),
        ({"then": "set:"}, 'then must be "delete" or "set:FIELD"'),
        ({"dead_letter": "orders"}, "dead_letter must be another table"),
        ({"where": "a\nb"}, r"where must have 1\.\.256 printable characters"),
        ({"in_flight_max": 0}, "in_flight_max must be more than 0"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PostgresOutboxTrigger(**{"connection": "shop", "table": "orders", **kwargs})


def test_the_tap_finds_acknowledgements_wherever_the_bytes_are_cut() -> None:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + (len(body) + 4).to_bytes(4, "big") + body

    def bind(name: bytes, parameter: bytes) -> bytes:
        return message(b"B", b"\0%b\0\0\0\0\x02%b%b" % (name, len(parameter).to_bytes(4, "big"), parameter) + b"\0" * 6)

    sent = b"".join(
        [
            message(b"", (80_877_103).to_bytes(4, "big")),
            message(b"", b"\0\x03\0\0user\0me\0\0"),
            message(b"P", b"a\0WITH told AS ...\0\0\0"),
            message(b"P", b"b\0SELECT 1\0\0\0"),
            bind(b"a", b'{1,"2"}'),
            bind(b"b", b"{3}"),
            bind(b"a", b"{}"),
        ]
    )
    for size in range(1, len(sent)):
        parser = PostgresAckParser()
        assert [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])] == ["1", "2"]


def test_a_password_is_in_no_error(station: PostgresStation) -> None:
    uri = station.uri.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
    with pytest.raises(PostgresPasses) as failed:
        PostgresClient(Connection.from_uri("shop", uri.replace(f":{station.tap.port}", ":2")), "test")
    assert PASSWORD not in str(failed.value) + repr(failed.value) + repr(failed.value.__cause__)
    PostgresClient(Connection.from_uri("shop", uri), "test").close()


def test_certificates_of_both_sides_are_checked(certify: Certify) -> None:
    if problem := why_none():
        skip_or_fail(problem)
    mine, client, other = certify("server"), certify("client"), certify("other")
    foreign = certify("foreign", address="127.0.0.2")
    server = PostgresStation()

    def opened(ca: tuple[Path, Path], own: tuple[Path, Path], mode: str = "verify-full") -> PostgresClient:
        query = f"sslmode={mode}&sslrootcert={ca[0]}&sslcert={own[0]}&sslkey={own[1]}"
        address = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{server.port}/postgres?{query}"
        return PostgresClient(Connection.from_uri("shop", address), "test")

    try:
        for each in (client, other):
            each[1].chmod(0o600)
        server.listen_tls(*mine, client[0])
        connection = opened(mine, client)
        assert connection.rows("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
        connection.close()
        with pytest.raises(BrokerMisconfigured, match="there is no TLS with the server: certificate verify failed"):
            opened(other, client)
        with pytest.raises(BrokerMisconfigured, match="there is no TLS with the server: alert unknown ca"):
            opened(mine, other)
        with pytest.raises(BrokerMisconfigured, match=r"refuses access: no pg_hba\.conf entry"):
            opened(mine, client, "disable")
        server.listen_tls(*foreign, client[0])
        with pytest.raises(BrokerMisconfigured, match="does not match host name"):
            opened(foreign, client)
    finally:
        server.close()
