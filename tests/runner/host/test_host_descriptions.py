"""A trigger that reads another stream than its supervisor expects is described, cleaned up, and not run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.authors import publish
from tests.runner.host.stream_rig import Rig, Watcher, hosting
from trio.testing import MockClock

from headgate.child.queries import secrets
from headgate.protocol.messages.runner import CancelTrigger, DescribedTrigger, TriggerSpec
from headgate.protocol.values import encode_value
from headgate.streams.identity import identify
from headgate.triggers.base import BaseTrigger, TriggerEvent

KEY = identify("k")


class Keyed(Watcher):
    """Watches the stream of a key that the test sets."""

    key: Any = "k"
    cleanups: list[str]
    cleanup_s = 0.0

    def shared_stream_key(self) -> Any:
        return type(self).key

    async def cleanup(self) -> None:
        await trio.sleep(type(self).cleanup_s)
        self.cleanups.append("cleanup")

    async def on_kill(self) -> None:
        self.cleanups.append("on_kill")


class Alone(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(1)
        await trio.sleep_forever()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keyed, "cleanups", [], raising=False)
    monkeypatch.setattr(Keyed, "key", "k")
    monkeypatch.setattr(Keyed, "cleanup_s", 0.0)


async def start(rig: Rig, cls: type[BaseTrigger], stream: str | None, run_id: str = "run-1") -> None:
    kwargs = encode_value({}, where="kwargs")
    await rig.host.start((TriggerSpec(1, run_id, "name", publish(cls), kwargs, stream=stream),))
    await rig.settle()


@pytest.mark.parametrize("expected", [None, "", "another"])
async def test_a_trigger_with_another_stream_than_expected_is_described_and_not_run(
    autojump_clock: MockClock, expected: str | None
) -> None:
    async with hosting() as rig:
        await start(rig, Keyed, expected)
        assert rig.described == [DescribedTrigger(1, "run-1", KEY.digest, "'k'")]
        assert rig.finished == []
        assert Keyed.cleanups == ["cleanup"]
        assert len(rig.host) == 0
        assert rig.streams.statistics().subscribers == 0
        # Its supervisor starts it anew.
        await start(rig, Keyed, KEY.digest, "run-2")
        await rig.publish(1)
        assert [event.trigger_run_id for event in rig.events] == ["run-2"]
        assert len(rig.described) == 1


async def test_a_trigger_that_reads_no_stream_is_described_and_run(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await start(rig, Alone, None)
        assert rig.described == [DescribedTrigger(1, "run-1", "", "")]
        assert [event.trigger_id for event in rig.events] == [1]


async def test_a_trigger_that_is_known_to_read_no_stream_is_not_described(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await start(rig, Alone, "")
        assert (rig.described, len(rig.events)) == ([], 1)


async def test_a_trigger_that_reads_no_stream_any_more_is_described_first(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await start(rig, Alone, KEY.digest)
        assert rig.described == [DescribedTrigger(1, "run-1", "", "")]
        assert (rig.events, len(rig.host)) == ([], 0)


async def test_the_description_is_sent_after_the_cleanup_so_that_a_new_start_finds_the_old_object_gone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyed, "cleanup_s", 3.0)
    async with hosting() as rig:
        await start(rig, Keyed, None)
        assert rig.described == []
        await trio.sleep(3.5)
        await rig.settle()
        assert (len(rig.described), Keyed.cleanups) == (1, ["cleanup"])


async def test_a_trigger_that_a_user_removes_before_it_is_described_ends_as_cancelled(
    autojump_clock: MockClock,
) -> None:
    async with hosting() as rig:
        kwargs = encode_value({}, where="kwargs")
        await rig.host.start((TriggerSpec(1, "run-1", "name", publish(Keyed), kwargs),))
        rig.host.cancel(CancelTrigger(1, "user"))
        await rig.settle()
        assert [(end.outcome, end.reason) for end in rig.finished] == [("cancelled", "user")]
        assert rig.described == []
        assert Keyed.cleanups == ["on_kill", "cleanup"]


async def test_a_stream_does_not_wait_for_a_trigger_that_reads_another_now(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Watcher):
        """Stays in the stream that the first one leaves."""

    async with hosting() as rig:
        await start(rig, Keyed, KEY.digest)
        digest = identify(Other().shared_stream_key()).digest
        assert digest != KEY.digest
        monkeypatch.setattr(Keyed, "key", Other().shared_stream_key())
        rig.streams.expect_rejoin(trigger_id=9, key=KEY)
        await rig.host.start((TriggerSpec(9, "run-9", "name", publish(Keyed), b"{}", stream=KEY.digest),))
        await rig.publish(1)
        assert [one.stream for one in rig.described] == [digest]
        assert [event.trigger_id for event in rig.events] == [1]


async def test_secrets_in_the_name_of_a_stream_are_masked(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyed, "key", ("amqp", "swordfish-7"))
    with secrets.apart():
        secrets.add("swordfish-7")
        async with hosting() as rig:
            await start(rig, Keyed, None)
            assert rig.described[0].stream_name == "('amqp', '***')"
