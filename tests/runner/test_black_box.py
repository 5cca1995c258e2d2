"""The runner's side of the black box: whose code is executed, and on which message."""

from __future__ import annotations

import trio

from headgate.child.logs import SpecNames, naming_trigger
from headgate.protocol.black_box import BOX_BYTES, Record, read_record
from headgate.protocol.messages.runner import TriggerSpec
from headgate.runner.black_box import BlackBox


def names(trigger_id: int) -> SpecNames:
    return SpecNames(TriggerSpec(trigger_id, f"run-{trigger_id}", "t", "a.T", b""))


def test_each_step_names_its_trigger_and_the_loop_itself_nobody() -> None:
    memory = bytearray(BOX_BYTES)
    seen: list[Record | None] = []

    def look() -> None:
        seen.append(read_record(bytes(memory)))

    async def child() -> None:
        look()

    async def trigger() -> None:
        look()
        await trio.lowlevel.checkpoint()
        look()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    async def main() -> None:
        look()
        async with trio.open_nursery() as nursery:
            for number in (1, 2):
                with naming_trigger(names(number)):
                    nursery.start_soon(trigger)
        look()

    trio.run(main, instruments=[BlackBox(memory)])
    assert seen[0] is None
    assert seen[-1] is None
    of_triggers = [record.trigger_run_id for record in seen if record is not None]
    assert sorted(of_triggers) == ["run-1"] * 3 + ["run-2"] * 3


def test_nobody_is_named_while_the_loop_waits() -> None:
    memory = bytearray(BOX_BYTES)
    seen: list[Record | None] = []

    class Look(trio.abc.Instrument):
        def after_io_wait(self, timeout: float) -> None:
            seen.append(read_record(bytes(memory)))

    async def main() -> None:
        with naming_trigger(names(1)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep, 0.001)

    trio.run(main, instruments=[BlackBox(memory), Look()])
    assert seen
    assert set(seen) == {None}


def test_a_message_stays_noted_when_its_trigger_goes_on_after_a_wait() -> None:
    memory = bytearray(BOX_BYTES)
    box = BlackBox(memory)
    seen: list[Record | None] = []

    async def trigger(of: SpecNames) -> None:
        note = box.messages_of(of)
        note("berlin:1")
        seen.append(read_record(bytes(memory)))
        await trio.lowlevel.checkpoint()
        seen.append(read_record(bytes(memory)))
        note(None)
        seen.append(read_record(bytes(memory)))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            of = names(1)
            with naming_trigger(of):
                nursery.start_soon(trigger, of)

    trio.run(main, instruments=[box])
    assert seen == [Record("run-1", "berlin:1"), Record("run-1", "berlin:1"), Record("run-1")]


def test_a_constructor_is_named() -> None:
    memory = bytearray(BOX_BYTES)
    box = BlackBox(memory)
    with box.executing(names(5)):
        assert read_record(bytes(memory)) == Record("run-5")
    assert read_record(bytes(memory)) is None
