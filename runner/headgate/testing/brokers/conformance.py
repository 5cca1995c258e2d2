"""`BrokerConformance`: the tests that every adapter of a broker has to pass. Subclass it, and give it a station."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import structlog

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.broker_trigger import BrokerTrigger
from headgate.brokers.threaded import ThreadedProducer
from headgate.testing.brokers.reading import Reading, names, subscribers
from headgate.testing.brokers.station import CONNECTION, Station, wait_until
from headgate.testing.crash.campaign import crash_test
from headgate.triggers.named_values import Connection
from headgate.triggers.shared_stream import LanePosition, SharedStreamProducer, SourceMissing

MESSAGES = 60
CUTS = 8  # of the link, each at another place of an answer
SERVER_KILLS = 3
CRASH_KILLS = 4
SECRET_CHARS_MIN = 6  # of what is masked: the password of a server that others use may be "guest"


class _Conformance:
    @pytest.fixture
    def station(self) -> Station:
        """The broker; to be overridden."""
        raise NotImplementedError("a conformance test needs a fixture `station`")

    def read(self, station: Station, count: int = 1, *, is_held: bool = False, **judged: Any) -> Reading:
        """Return a runner in memory with so many subscribers of the station's source."""
        kwargs = judged.pop("kwargs", {})
        triggers = subscribers(lambda: station.trigger(**kwargs), count, **judged)
        return Reading(*triggers, uri=station.uri, is_held=is_held)


class SourceConformance(_Conformance):
    """What can be tested on a server that others use, too: nothing here ends or stops it.

    Subclass it where starting a server takes long, and `ServerConformance` in campaigns.
    """

    # --- what is stored, and when it is acknowledged ------------------------------------------------

    def test_every_message_is_stored_once_for_each_subscriber_and_then_acknowledged(self, station: Station) -> None:
        station.publish(names(MESSAGES // 2))
        with self.read(station, 2) as reading:
            station.publish(names(MESSAGES // 2, MESSAGES // 2))
            for subscriber in range(2):
                reading.wait_stored(names(MESSAGES), subscriber)
                if station.keeps_order:
                    assert reading.order(subscriber) == names(MESSAGES)
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
        assert len(set(station.tap.acknowledged)) == MESSAGES

    def test_nothing_is_acknowledged_before_it_is_stored(self, station: Station) -> None:
        station.publish(names(MESSAGES))
        with self.read(station, 2, is_held=True) as reading:
            reading.wait_stored(names(1), 1)
            station.publish(names(1, MESSAGES))
            wait_until(lambda: reading.outstanding() > MESSAGES // 2, "messages wait to be stored")
            assert station.tap.acknowledged == []
            assert len(list(station.pending())) == MESSAGES + 1
            reading.confirm()
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_a_message_on_which_a_subscriber_fails_comes_again_and_nothing_behind_it_is_acknowledged_before(
        self, station: Station
    ) -> None:
        failing = names(1, MESSAGES // 2)
        station.publish(names(MESSAGES))
        with self.read(station, 2, fails=failing) as reading:
            for subscriber in range(2):
                reading.wait_stored(names(MESSAGES), subscriber)
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
            assert reading.stored(1) == dict.fromkeys(names(MESSAGES), 1), "the other has stored nothing twice"
        if station.keeps_order:
            acknowledged = list(dict.fromkeys(station.tap.acknowledged))
            assert acknowledged == sorted(acknowledged, key=_numbers)

    def test_failures_of_the_only_subscriber_cost_no_connection(
        self, station: Station, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new one would cost a delivery of all messages that were handed out, and of these many brokers count few."""
        trigger_class = type(station.trigger())
        make = trigger_class.create_shared_stream_producer
        made: list[SharedStreamProducer] = []

        def noting(kwargs: dict[str, Any]) -> SharedStreamProducer:
            made.append(make(kwargs))
            return made[-1]

        monkeypatch.setattr(trigger_class, "create_shared_stream_producer", staticmethod(noting))
        station.publish(names(MESSAGES))
        with self.read(station, fails=names(3, MESSAGES // 2)) as reading:
            reading.wait_stored(names(MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
        assert len(made) == 1

    def test_no_more_is_taken_than_may_be_in_flight(self, station: Station) -> None:
        station.publish(names(MESSAGES))
        with self.read(station, kwargs={"in_flight_max": 7}, is_held=True) as reading:
            wait_until(lambda: reading.outstanding() == 7, "as many messages are handed out as may be")
            station.publish(names(1, MESSAGES))
            assert sum(reading.stored().values()) <= 7
            reading.confirm()
            reading.wait_stored(names(MESSAGES + 1))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_a_source_is_checked_and_nothing_is_taken(self, station: Station) -> None:
        trigger = station.trigger()
        if not isinstance(trigger, BrokerTrigger):
            pytest.skip("`headgate brokers check` asks triggers that are a BrokerTrigger")
        station.publish(names(MESSAGES))
        for _ in range(2):
            checked = trigger.check(station.uri)
            assert checked.problem == ""
            assert checked.lag in (None, MESSAGES), "what waits is counted, if the broker tells"
        assert station.tap.acknowledged == []
        assert len(list(station.pending())) == MESSAGES
        with self.read(station) as reading:
            reading.wait_stored(names(MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_a_source_tells_how_far_it_is_and_is_left_as_it_is(self, station: Station) -> None:
        station.publish(names(MESSAGES))
        lanes = _positions(station)
        for _ in range(2):
            assert _positions(station) == lanes
            assert sum(lane.lag or 0 for lane in lanes) in (0, MESSAGES), "what waits is counted, if the broker tells"
            assert not any(lane.missing for lane in lanes)
        assert station.tap.acknowledged == []
        with self.read(station) as reading:
            reading.wait_stored(names(MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
        if lanes and station.can_be_deleted:
            station.delete()
            with pytest.raises(SourceMissing, match=r"exist|no such"):
                _positions(station)

    # --- what cannot be handled -------------------------------------------------------------------------

    def test_a_rejected_message_is_a_dead_letter_before_it_is_acknowledged(self, station: Station) -> None:
        refused = names(1, 3)
        station.publish(names(MESSAGES))
        with self.read(station, 2, rejects=refused, is_held=True) as reading:
            wait_until(lambda: reading.letters, "there is a letter")
            assert station.tap.acknowledged == []
            reading.confirm()
            reading.wait_stored(names(MESSAGES), 1)
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
            (letter,) = reading.letters
            assert letter.is_whole
            assert refused[0] in letter.payload_head.decode()
            assert "the test rejects it" in letter.reason
            assert refused[0] not in reading.stored(0)

    def test_a_rejected_message_goes_to_the_place_that_the_broker_has_for_it(self, station: Station) -> None:
        place = station.with_place()
        if place is None:
            pytest.skip("this broker has no place for rejected messages")
        refused = names(2, 3)
        station.publish(names(MESSAGES))
        with self.read(station, rejects=refused, kwargs=place) as reading:
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
            assert reading.letters == []
        found = "\n".join(station.in_place())
        assert [name for name in names(MESSAGES) if name in found] == refused

    def test_messages_that_no_filter_may_get_are_letters_and_hold_up_nothing(self, station: Station) -> None:
        spoilt = station.spoilt()
        station.publish(names(1))
        for publish in spoilt.values():
            publish()
        station.publish(names(1, 1))
        with self.read(station, 2) as reading:
            for subscriber in range(2):
                reading.wait_stored(names(2), subscriber)
            wait_until(lambda: len(reading.letters) >= 2 * len(spoilt), "each is a letter of each subscriber")
            whole = sum(letter.is_whole for letter in reading.letters) // 2
            wait_until(
                lambda: len(list(station.pending())) == len(spoilt) - whole,
                "what nobody has whole stays with the broker, and nothing else",
            )

    # --- names ---------------------------------------------------------------------------------------------

    def test_a_message_has_the_same_key_at_each_delivery_and_no_other_has_it(self, station: Station) -> None:
        if not station.key_is_stable:
            pytest.skip("messages of this broker have no key")
        station.publish(names(MESSAGES))
        seen: list[dict[str, str | None]] = []
        for is_killed in (False, True, False):
            with self.read(station, is_held=True) as reading:
                reading.wait_stored(names(MESSAGES))
                seen.append(reading.keys())
            if is_killed and station.server is not None:
                station.server.crash()
        assert seen[0] == seen[1] == seen[2]
        assert None not in seen[0].values()
        assert len(set(seen[0].values())) == MESSAGES
        station.delete()
        station.create()
        station.publish(names(MESSAGES, MESSAGES))
        with self.read(station) as reading:
            reading.wait_stored(names(MESSAGES, MESSAGES))
            assert not set(reading.keys().values()) & set(seen[0].values()), "those of a source of the same name"

    # --- trouble ------------------------------------------------------------------------------------------

    def test_a_link_that_is_cut_within_an_answer_costs_no_message(self, station: Station) -> None:
        published: list[str] = []
        with self.read(station, 2) as reading:
            for number in range(CUTS):
                station.tap.cut_after(100 + 777 * number)
                while station.tap.is_cut_pending:
                    more = names(MESSAGES, len(published))
                    station.publish(more)
                    published += more
                    reading.wait_stored(published)
            reading.wait_stored(published, 1)
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_what_was_handed_out_before_a_cut_is_acknowledged_after_it_and_nothing_else(self, station: Station) -> None:
        station.publish(names(MESSAGES))
        with (
            structlog.testing.capture_logs() as records,
            self.read(station, kwargs={"in_flight_max": MESSAGES // 2}, is_held=True) as reading,
        ):
            reading.wait_stored(names(MESSAGES // 2))
            links = station.tap.links
            station.tap.cut()
            wait_until(lambda: station.tap.links > links, "it is connected again")
            assert station.tap.acknowledged == []
            reading.confirm()
            reading.wait_stored(names(MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")
        assert not any(secret in repr(records) for secret in _passwords(station)), "trouble is logged without secrets"

    def test_a_source_that_is_deleted_ends_the_stream_with_an_error_that_names_it(self, station: Station) -> None:
        if not station.can_be_deleted:
            pytest.skip("there is nothing to delete")
        station.publish(names(1))
        reading = Reading(station.trigger(), uri=station.uri, has_restarts=False)
        with reading:
            reading.wait_stored(names(1))
            station.delete()
            failure = reading.failure()
        assert isinstance(failure, BrokerMisconfigured)
        assert "does not exist" in str(failure)

    def test_a_mistake_of_the_user_is_refused_with_an_error_that_shows_no_secret(self, station: Station) -> None:
        wrong: list[str] = []
        for what, refusal in station.refusals().items():
            trigger = station.trigger(**refusal.kwargs)
            with (
                structlog.testing.capture_logs() as records,
                Reading(trigger, uri=refusal.uri or station.uri, has_restarts=False) as reading,
            ):
                failure = reading.failure()
            text = f"{type(failure).__name__}: {failure}"
            if not isinstance(failure, BrokerMisconfigured) or refusal.says not in text:
                wrong.append(f"{what}: {text}")
            shown = text + repr(failure) + repr(trigger) + repr(trigger.serialize()) + repr(records)
            if refusal.secret and refusal.secret in shown:
                wrong.append(f"{what} shows {refusal.secret}")
        assert wrong == []
        assert station.tap.acknowledged == []

    # --- with the real pair ---------------------------------------------------------------------------------

    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        folder, frames = tmp_path / "crash", tmp_path / "frames"
        report = crash_test(
            station.trigger(),
            station,
            subscribers=3,
            kills=CRASH_KILLS,
            folder=folder,
            settings={f"conn_{CONNECTION}": station.uri, "capture": str(frames)},
            kill_broker=None if station.server is None else station.server.crash,
        )
        assert report.faults() == []
        assert report.kills == CRASH_KILLS
        written = [path for place in (folder, frames) for path in place.rglob("*") if path.is_file()]
        assert any(path.is_relative_to(frames) for path in written)
        for secret in _passwords(station):
            showing = [path.name for path in written if secret.encode() in path.read_bytes()]
            assert showing == [], "logs, captures and the database show no secret"


class ServerConformance(_Conformance):
    """What needs a server of the test's own: it is killed and stopped."""

    def test_a_broker_that_is_killed_under_load_costs_no_message(self, station: Station) -> None:
        assert station.server is not None
        with self.read(station, 2) as reading:
            for number in range(SERVER_KILLS):
                station.publish(names(MESSAGES, number * MESSAGES))
                wait_until(lambda: reading.stored(), "messages flow")
                station.server.crash()
            for subscriber in range(2):
                reading.wait_stored(names(SERVER_KILLS * MESSAGES), subscriber)
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_a_broker_that_hangs_and_goes_on_costs_no_message(self, station: Station) -> None:
        assert station.server is not None
        station.publish(names(MESSAGES))
        with self.read(station, is_held=True) as reading:
            reading.wait_stored(names(MESSAGES))
            station.server.pause()
            reading.confirm()
            station.server.resume()
            station.publish(names(MESSAGES, MESSAGES))
            reading.wait_stored(names(2 * MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    def test_a_stream_is_closed_although_its_broker_hangs(self, station: Station) -> None:
        assert station.server is not None
        station.publish(names(MESSAGES))
        with self.read(station) as reading:
            reading.wait_stored(names(MESSAGES))
            station.server.pause()
        station.server.resume()


class BrokerConformance(SourceConformance, ServerConformance):
    """All tests, for a station with a server of its own. Subclass it as ``TestMyBroker``, with a fixture `station`::

        class TestRedisStreams(BrokerConformance):
            @pytest.fixture
            def station(self, tmp_path):
                station = RedisStation(tmp_path, find_server())
                station.create()
                yield station
                station.close()

    The station is started, and empty.
    """


def _positions(station: Station) -> Sequence[LanePosition]:
    trigger = station.trigger()
    _, kwargs = trigger.serialize()
    producer = trigger.create_shared_stream_producer(kwargs)
    if not isinstance(producer, ThreadedProducer):
        pytest.skip("its producer asks no server")
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    try:
        return producer.positions()
    finally:
        producer.disconnect()


def _passwords(station: Station) -> set[str]:
    """Return the password of the station, as it is and as it is written in the URI, unless it is a word like any."""
    written = urlsplit(station.uri).password or ""
    return {each for each in (written, unquote(written)) if len(each) >= SECRET_CHARS_MIN}


def _numbers(name: str) -> list[int]:
    """Return what the broker counts its messages by."""
    return [int(number) for number in re.findall(r"\d+", name)]
