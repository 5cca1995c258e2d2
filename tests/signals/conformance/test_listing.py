"""Any implementation of signals lists them so: those that are kept, in the order of their versions, by pages."""

from __future__ import annotations

import re

import pytest
from tests.signals.conformance.rigs import Rig

from headgate.protocol.messages.signals import SIGNALS_PER_PAGE_MAX
from headgate.signals import BaseSignalService, Signal, UnreadableValue
from headgate.store.signals.sending import NewSignal


def fill(service: BaseSignalService, key: str, count: int) -> None:
    for first in range(1, count + 1, 1000):
        service.send_signals([Signal(key, number) for number in range(first, min(first + 1000, count + 1))])


def versions(service: BaseSignalService, key: str = "a", **which: int) -> list[int]:
    found = service.list_signals(key, **which)
    assert [one.value for one in found] == [one.version for one in found], "`fill` has sent them"
    return [one.version for one in found]


def test_of_a_key_that_nobody_has_sent_there_are_none(service: BaseSignalService) -> None:
    assert service.list_signals("a") == []
    assert service.list_signals("a", 1) == []


def test_versions_above_a_place_are_listed(service: BaseSignalService) -> None:
    fill(service, "a", 5)
    assert versions(service) == [1, 2, 3, 4, 5]
    assert versions(service, after=3) == [4, 5]
    assert versions(service, after=5) == []
    assert versions(service, after=7) == []


def test_one_version_is_listed_alone(service: BaseSignalService) -> None:
    fill(service, "a", 3)
    assert versions(service, version=2) == [2]
    assert versions(service, version=4) == []
    assert versions(service, version=0) == []


def test_a_page_has_as_many_as_were_asked_for(service: BaseSignalService) -> None:
    fill(service, "a", 5)
    assert versions(service, limit=2) == [1, 2]
    assert versions(service, after=2, limit=2) == [3, 4]


@pytest.mark.parametrize("limit", [0, -1, SIGNALS_PER_PAGE_MAX + 1])
def test_a_page_of_no_size_is_refused(service: BaseSignalService, limit: int) -> None:
    with pytest.raises(Exception, match=re.escape(f"limit must be from 1 to 1,000: {limit}")):
        service.list_signals("a", limit=limit)


@pytest.mark.parametrize("number", [-1, 2**63, 2**64])
@pytest.mark.parametrize("name", ["after", "version"])
def test_what_is_no_version_is_refused(service: BaseSignalService, name: str, number: int) -> None:
    expected = f"{name} must be a version, from 0 to 9,223,372,036,854,775,807, not {number:,}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        service.list_signals("a", **{name: number})


def test_page_by_page_all_versions_come(service: BaseSignalService) -> None:
    fill(service, "a", 2345)
    seen: list[int] = []
    while page := versions(service, after=seen[-1] if seen else 0):
        assert len(page) <= SIGNALS_PER_PAGE_MAX
        seen += page
    assert seen == list(range(1, 2346))
    assert [one.version for one in service.listen_signal("me", "a", after=0, timeout=0)] == seen


def test_a_page_of_large_values_ends_early_and_the_next_goes_on(service: BaseSignalService) -> None:
    values = [f"{number:02}" + "x" * 45_000 for number in range(30)]
    for first in (0, 15):
        service.send_signals([Signal("a", value) for value in values[first : first + 15]])
    page = service.list_signals("a")
    assert 0 < len(page) < 30
    seen = list(page)
    while page := service.list_signals("a", after=seen[-1].version):
        seen += page
    assert [one.value for one in seen] == values


def test_a_version_that_is_not_kept_any_more_is_not_listed(
    service: BaseSignalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.store.signals.sending.VERSIONS_KEPT_MAX", 3)
    fill(service, "a", 5)
    assert versions(service) == [3, 4, 5]
    assert versions(service, version=2) == []


def test_what_is_listed_says_who_sent_it_and_when(service: BaseSignalService) -> None:
    fill(service, "a", 2)
    service.send_signal("a", 3)
    times = []
    for one in service.list_signals("a"):
        assert one.sender
        assert one.sent_at is not None
        assert one.sent_at.tzinfo is not None
        times.append(one.sent_at)
    assert times == sorted(times)


def test_a_malformed_key_is_refused(rig: Rig, service: BaseSignalService) -> None:
    for key in ("", "a" * 513, "a\0"):
        with pytest.raises(ValueError, match="the key of a signal"):
            service.list_signals(key)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"$":"users.Type","v":1}', "no type is registered under 'users.Type'"),
        (b'{"$":"datetime","v":"never"}', "the content of a 'datetime' is malformed"),
        (b'{"$":1}', "is not a tag and its content"),
        (b'{"$":"tuple","v":' + b"[" * 150 + b"]" * 150 + b"}", "nested deeper than 100 levels"),
    ],
)
def test_a_value_that_cannot_be_read_keeps_no_other_signal_from_anybody(
    rig: Rig, service: BaseSignalService, data: bytes, problem: str
) -> None:
    """Another program has sent it, which has a type that is not registered here."""
    fill(service, "a", 1)
    rig.store.signals.send([NewSignal("a", data, "by another", "another program")])
    service.send_signal("a", 3)
    listed = service.list_signals("a")
    assert list(service.listen_signal("me", "a", after=0, timeout=0)) == listed
    assert [one.version for one in listed] == [1, 2, 3]
    unreadable = listed[1].value
    assert isinstance(unreadable, UnreadableValue)
    assert (unreadable.data, problem in unreadable.error) == (data, True)
    assert listed[2].value == 3
