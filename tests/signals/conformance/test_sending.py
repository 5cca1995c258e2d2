"""Any implementation of signals sends them so: versions without a gap, and one for each dedup (I25)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from tests.signals.conformance.rigs import Rig
from tests.store.signals.test_sending import new

from headgate.protocol.errors import ValueNotSerializable, ValueTooLong
from headgate.protocol.messages.signals import SENDS_MAX, SIGNAL_BYTES_MAX
from headgate.signals import BaseSignalService, Signal, SignalVersion


def stored(service: BaseSignalService, key: str) -> list[tuple[int, Any]]:
    return [(one.version, one.value) for one in service.list_signals(key)]


def sent_as(sent: list[SignalVersion]) -> list[tuple[int, bool]]:
    return [(one.version, one.is_new) for one in sent]


def test_the_first_signal_of_a_key_is_version_1(service: BaseSignalService) -> None:
    sent = service.send_signal("model", {"auc": 0.93}, dedup="d")
    assert sent == SignalVersion("model", {"auc": 0.93}, "d", 1, True)


def test_versions_of_a_key_have_no_gap(service: BaseSignalService) -> None:
    versions = [service.send_signal(key, number) for number, key in enumerate("abaab")]
    assert [one and one.version for one in versions] == [1, 1, 2, 3, 2]
    assert stored(service, "a") == [(1, 0), (2, 2), (3, 3)]
    assert stored(service, "b") == [(1, 1), (2, 4)]


def test_the_signals_of_one_call_are_sent_in_their_order(service: BaseSignalService) -> None:
    sent = service.send_signals([Signal("a", 1), Signal("b", 2), Signal("a", 3)])
    assert [(one.key, one.value, one.version) for one in sent] == [("a", 1, 1), ("b", 2, 1), ("a", 3, 2)]
    assert stored(service, "a") == [(1, 1), (2, 3)]


def test_no_signals_are_no_call(service: BaseSignalService) -> None:
    assert service.send_signals([]) == []


def test_a_second_one_of_a_dedup_is_not_sent_and_has_the_first_version(service: BaseSignalService) -> None:
    service.send_signal("a", "before")
    first = service.send_signal("a", "first", dedup="d")
    again = service.send_signal("a", "second", dedup="d")
    assert first is not None
    assert again is not None
    assert sent_as([first, again]) == [(2, True), (2, False)]
    assert again.value == "second", "what was to be sent: the one that was sent is listed"
    assert stored(service, "a") == [(1, "before"), (2, "first")]


def test_a_dedup_counts_within_a_call_as_well(service: BaseSignalService) -> None:
    sent = service.send_signals([Signal("a", 1, "x"), Signal("a", 2, "x"), Signal("a", 3, "y")])
    assert sent_as(sent) == [(1, True), (1, False), (2, True)]
    assert stored(service, "a") == [(1, 1), (2, 3)]


def test_a_dedup_belongs_to_its_key(rig: Rig, service: BaseSignalService) -> None:
    assert sent_as(service.send_signals([Signal("a", 1, "x"), Signal("b", 2, "x")])) == [(1, True), (1, True)]
    with rig.open("other") as other:
        assert sent_as(other.send_signals([Signal("a", 3, "x")])) == [(1, True)]


def test_without_a_dedup_each_is_sent(service: BaseSignalService) -> None:
    sent = [service.send_signal("a", 1) for _ in range(3)]
    assert [one and one.version for one in sent] == [1, 2, 3]


def test_namespaces_keep_keys_apart(rig: Rig, service: BaseSignalService) -> None:
    with rig.open("other") as other:
        service.send_signal("a", "here")
        other.send_signal("a", "there")
        assert (stored(service, "a"), stored(other, "a")) == ([(1, "here")], [(1, "there")])


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"nested": [1, 2.5, "x", None, {"deep": True}]},
        "Grüße, 你好, \U0001f600",
        2**80,
        (1, 2),
        b"\x00\xff",
        datetime(2026, 3, 29, 2, 30, tzinfo=UTC),
        timedelta(days=1, microseconds=1),
        Decimal("0.10"),
        {1: "one", "$": "two"},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_arrives_as_it_was_sent(service: BaseSignalService, value: Any) -> None:
    service.send_signal("a", value)
    (found,) = service.list_signals("a")
    assert (found.value, type(found.value)) == (value, type(value))


def test_the_largest_value_arrives_whole(service: BaseSignalService) -> None:
    value = "x" * (SIGNAL_BYTES_MAX - 2)  # and its quotes
    service.send_signal("a", value)
    assert stored(service, "a") == [(1, value)]


def test_a_key_may_be_as_long_as_it_says_and_of_any_letters(rig: Rig) -> None:
    with rig.open("n" * 99 + "ß") as service:
        key = "键" * 511 + " "
        service.send_signal(key, 1, dedup="é" * 512)
        assert stored(service, key) == [(1, 1)]


@pytest.mark.parametrize(
    ("signal", "problem"),
    [
        (Signal(""), "the key of a signal '' must have 1..512 characters, not 0"),
        (Signal("a" * 513), "must have 1..512 characters, not 513"),
        (Signal("a\nb"), r"the key of a signal 'a\\nb' must not contain '\\n'"),
        (Signal("a\ud800"), "must not contain"),
        (Signal("a", dedup=""), "the dedup of the signal 'a' '' must have 1..512 characters, not 0"),
        (Signal("a", dedup="d" * 513), "must have 1..512 characters, not 513"),
        (Signal("a", dedup="\0"), "the dedup of the signal 'a' .* must not contain"),
    ],
    ids=["empty", "long", "control", "surrogate", "empty dedup", "long dedup", "control in dedup"],
)
def test_a_malformed_signal_is_refused_and_none_of_its_call_is_sent(
    service: BaseSignalService, signal: Signal, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        service.send_signals([Signal("good"), signal])
    assert service.list_signals("good") == []


@pytest.mark.parametrize("namespace", ["", "n" * 101, "a\tb"])
def test_a_malformed_namespace_is_refused(rig: Rig, namespace: str) -> None:
    with rig.open(namespace) as service:
        with pytest.raises(ValueError, match="the namespace"):
            service.send_signal("a")
        with pytest.raises(ValueError, match="the namespace"):
            service.list_signals("a")
        with pytest.raises(ValueError, match="the namespace"):
            service.listen_signal("me", "a", timeout=0)


def test_a_value_that_cannot_be_sent_is_refused(service: BaseSignalService) -> None:
    with pytest.raises(ValueNotSerializable, match="signal 'a'"):
        service.send_signal("a", object())
    with pytest.raises(ValueTooLong, match=r"signal 'a' needs 49,153 bytes; the limit is 49,152"):
        service.send_signal("a", "x" * (SIGNAL_BYTES_MAX - 1))
    assert service.list_signals("a") == []


def test_a_call_sends_so_many_at_most(service: BaseSignalService) -> None:
    with pytest.raises(Exception, match="1,001 signals are sent at once; the limit is 1,000"):
        service.send_signals([Signal("a", number) for number in range(SENDS_MAX + 1)])
    assert service.list_signals("a") == []
    sent = service.send_signals([Signal("a", number) for number in range(SENDS_MAX)])
    assert [one.version for one in sent] == list(range(1, SENDS_MAX + 1))


def test_one_key_too_many_is_refused(service: BaseSignalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.store.signals.sending.KEYS_MAX", 0)
    with pytest.raises(Exception, match="there are 0 keys of signals already: `headgate signals forget KEY`"):
        service.send_signal("a")
    assert service.list_signals("a") == []


def test_a_signal_for_one_run_takes_a_version_and_others_do_not_get_it(rig: Rig, service: BaseSignalService) -> None:
    rig.make_run()
    other = rig.store.tasks.create_run("etl", "other")
    assert other is not None
    service.send_signal("a", "before")
    rig.store.signals.send([new("a", "for one run", dag_run=other)])
    service.send_signal("a", "behind")
    expected = [(1, "before"), (2, "for one run"), (3, "behind")]
    assert stored(service, "a") == (expected if rig.sees_all_runs else [expected[0], expected[2]])
    heard = [one.version for one in service.listen_signal("me", "a", after=0, timeout=0)]
    assert heard == ([1, 2, 3] if rig.sees_all_runs else [1, 3])
