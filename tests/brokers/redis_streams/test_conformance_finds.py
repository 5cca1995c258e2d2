"""The conformance suite finds what is wrong with an adapter: each of its promises is broken once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.brokers.redis_streams.faulty_streams import FaultyTrigger

from headgate.testing.brokers import station as stations
from headgate.testing.brokers.conformance import BrokerConformance
from headgate.testing.brokers.redis_station import RedisStation
from headgate.testing.brokers.station import CONNECTION

Suite = BrokerConformance


class FaultyStation(RedisStation):
    """A station whose triggers have a fault."""

    fault: str

    def trigger(self, **kwargs: Any) -> FaultyTrigger:
        given: dict[str, Any] = {"connection": CONNECTION, "stream": self.stream, "group": self.group, **kwargs}
        return FaultyTrigger(fault=self.fault, **given)


@pytest.fixture
def station(tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStation]:
    # Where something does not come, it never will; a broker on this machine needs no second for anything else.
    monkeypatch.setattr(stations, "WITHIN_S", 5.0)
    station = FaultyStation(tmp_path, redis_server)
    try:
        station.create()
        yield station
    finally:
        station.close()


@pytest.mark.parametrize(
    ("fault", "test", "finding"),
    [
        ("Hasty", Suite.test_nothing_is_acknowledged_before_it_is_stored, r"assert \["),
        ("Nameless", Suite.test_a_message_has_the_same_key_at_each_delivery_and_no_other_has_it, "assert "),
        ("Forgetful", Suite.test_what_was_handed_out_before_a_cut_is_acknowledged_after_it_and_nothing_else, "is ack"),
        (
            "Careless",
            Suite.test_a_message_on_which_a_subscriber_fails_comes_again_and_nothing_behind_it_is_acknowledged_before,
            "subscriber 0 has all of 60 messages",
        ),
        ("Greedy", Suite.test_no_more_is_taken_than_may_be_in_flight, "as many messages are handed out as may be"),
        ("Throwing", Suite.test_a_rejected_message_goes_to_the_place_that_the_broker_has_for_it, "assert "),
        ("Stubborn", Suite.test_a_source_that_is_deleted_ends_the_stream_with_an_error_that_names_it, "subscriber 0"),
    ],
)
def test_a_fault_is_found(station: FaultyStation, fault: str, test: Any, finding: str) -> None:
    station.fault = fault
    with pytest.raises(AssertionError, match=finding):
        test(Suite(), station)
