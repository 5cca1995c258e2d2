"""Any implementation of signals keeps its promises to many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.signals.conformance.rigs import Rig
from tests.waiting import WITHIN_S

from headgate.signals import Signal

SENDERS, CALLS, AT_ONCE = 8, 25, 4
TOTAL = SENDERS * CALLS * AT_ONCE

pytestmark = pytest.mark.usefixtures("patient_sqlite")


def send_many(rig: Rig, sender: int) -> list[int]:
    """Send one sender's signals, every third call twice; return the versions of the first time."""
    versions = []
    with rig.open() as service:
        for call in range(CALLS):
            signals = [Signal("a", [sender, call, one], f"{sender}.{call}.{one}") for one in range(AT_ONCE)]
            sent = [one.version for one in service.send_signals(signals)]
            if not call % 3:
                again = service.send_signals(signals)
                assert [(one.version, one.is_new) for one in again] == [(version, False) for version in sent]
            versions += sent
    return versions


def test_many_senders_to_one_key_get_each_version_once(rig: Rig) -> None:
    with ThreadPoolExecutor(SENDERS) as threads:
        sent = list(threads.map(send_many, [rig] * SENDERS, range(SENDERS), timeout=WITHIN_S))
    assert sorted(version for versions in sent for version in versions) == list(range(1, TOTAL + 1))
    assert all(versions == sorted(versions) for versions in sent), "those of one sender are in its order"
    with rig.open() as service:
        found = service.list_signals("a")
    assert [one.version for one in found] == list(range(1, TOTAL + 1))
    assert len({tuple(one.value) for one in found}) == TOTAL


def test_listeners_hear_what_many_send_in_order_and_once(rig: Rig) -> None:
    def listen() -> list[int]:
        with rig.open() as service:
            signals = service.listen_signal("me", "a", after=0, timeout=WITHIN_S)
            return [next(signals).version for _ in range(TOTAL)]

    with ThreadPoolExecutor(SENDERS + 2) as threads:
        heard = [threads.submit(listen) for _ in range(2)]
        sending = [threads.submit(send_many, rig, sender) for sender in range(SENDERS)]
        for one in sending:
            one.result(WITHIN_S)
        assert [one.result(WITHIN_S) for one in heard] == [list(range(1, TOTAL + 1))] * 2


def test_senders_of_the_same_keys_in_other_orders_do_not_block_each_other(rig: Rig) -> None:
    def send(keys: str) -> None:
        with rig.open() as service:
            for _ in range(20):
                service.send_signals([Signal(key) for key in keys])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, ["ab", "ba", "ab", "ba"], timeout=WITHIN_S))
    with rig.open() as service:
        for key in "ab":
            assert [one.version for one in service.list_signals(key)] == list(range(1, 81))
