"""run_trigger runs any trigger without its waits, and fails for what would go wrong in a runner."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio

from headgate.testing import (
    LeftBehind,
    LoopBlocked,
    Misbehaved,
    RoundTripFailed,
    TooFewEvents,
    TriggerFailed,
    run_trigger,
)
from headgate.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent
from headgate.triggers.file import FileTrigger
from headgate.triggers.temporal import DateTimeTrigger, TimeDeltaTrigger

HOUR = timedelta(hours=1)
NO_EVENTS: tuple[TriggerEvent, ...] = ()


class _Kwargs(BaseTrigger):
    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", self._kwargs


class Sleeper(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep(3600)
        yield TriggerEvent({"slept": HOUR, "pair": (1, 2)})


class Beat(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        last = await self.last_event()
        beat = 0 if last is None else last.payload + 1
        while True:
            yield TriggerEvent(beat, key=str(beat))
            beat += 1
            await trio.sleep(60)


class Endless(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            yield TriggerEvent()


class TooLong(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(1, is_last=True)
        yield TriggerEvent(2)


class Silent(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep_forever()
        yield TriggerEvent()


class Returning(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.lowlevel.checkpoint()
        for event in NO_EVENTS:
            yield event


class Raising(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("before")
        raise ValueError("no more")


class Succeeding(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TaskSuccessEvent(xcoms={"rows": 3})


class WallClock(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        begun, stamp = datetime.now(UTC), time.time()
        while datetime.now(UTC) - begun < HOUR:  # noqa: ASYNC110 - nobody could set an event for a time of day
            await trio.sleep(60)
        yield TriggerEvent({"waited": datetime.now(UTC) - begun, "stamp_s": time.time() - stamp, "at": datetime.now()})


class Threaded(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        let_go = threading.Event()
        with trio.fail_after(3600):
            # The thread works for as long as this, in real time; nothing may time out meanwhile.
            await trio.to_thread.run_sync(let_go.wait, 0.2)
        yield TriggerEvent(trio.current_time())


class Asking(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        with trio.fail_after(3600):
            async with await trio.open_tcp_stream("127.0.0.1", self._kwargs["port"]) as stream:
                await stream.send_all(b"?")
                answer = await stream.receive_some(1)
                # The end of the stream says that the server has closed its descriptor, which is one of this process.
                assert await stream.receive_some(1) == b""
                yield TriggerEvent(answer)


class Blocking(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        time.sleep(self._kwargs["seconds"])  # noqa: ASYNC251 - this is the offence
        yield TriggerEvent()


class BlockingForEver(_Kwargs):
    let_go = threading.Event()

    async def run(self) -> AsyncIterator[TriggerEvent]:
        BlockingForEver.let_go.wait(60)
        yield TriggerEvent()


class DropsASocket(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.socket = socket.socket()
        yield TriggerEvent()


class KeepsASocket(_Kwargs):
    kept: socket.socket

    async def run(self) -> AsyncIterator[TriggerEvent]:
        KeepsASocket.kept = socket.socket()
        yield TriggerEvent()


class LeavesATask(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        trio.lowlevel.spawn_system_task(trio.sleep_forever, name="forgotten")
        yield TriggerEvent()


class CleansUp(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.socket = socket.socket()
        yield TriggerEvent()
        await trio.sleep_forever()

    async def cleanup(self) -> None:
        await trio.sleep(1)
        self.socket.close()


class FailsToClose(_Kwargs):
    async def run(self) -> AsyncGenerator[TriggerEvent]:
        try:
            while True:
                yield TriggerEvent(0)
        finally:
            raise ValueError("it is not open")


class FailsToCleanUp(Beat):
    async def cleanup(self) -> None:
        raise OSError("the server is gone")


class Stubborn(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent()
        with trio.CancelScope(shield=True):
            await trio.sleep(10**9)


class FiresNonsense(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent({"callback": print})
        yield TriggerEvent("fine")


class Secretive(BaseTrigger):
    """Forgets two of its arguments; of the third it makes something that no database could keep."""

    def __init__(self, pattern: str = "*", timeout_s: float = 5.0, on_event: Any = None) -> None:
        self._pattern = iter([pattern])
        self._timeout_s = timeout_s
        self.on_event = on_event
        self._text = pattern

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Secretive", {"pattern": self._text}

    async def run(self) -> AsyncGenerator[TriggerEvent, None]:
        yield TriggerEvent(next(self._pattern))


class Defaulting(BaseTrigger):
    """Makes itself what it was not given."""

    def __init__(self, name: str = "made", client: Any = None, since: float | None = None) -> None:
        self.name = name
        self.client = client or object()
        self._since = since or time.perf_counter()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Defaulting", {}

    async def run(self) -> AsyncGenerator[TriggerEvent, None]:
        yield TriggerEvent(self.name)


class Forgetful(BaseTrigger):
    """Leaves an argument out of what it says of itself."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url = url
        self.timeout_s = timeout_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Forgetful", {"url": self.url}

    def run(self) -> AsyncIterator[TriggerEvent]:
        raise NotImplementedError


class Renaming(Forgetful):
    """Says its argument under another name."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Renaming", {"uri": self.url}


class Growing(Forgetful):
    """Adds to its argument each time."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Growing", {"url": self.url + "/"}


# --- what comes of a good one --------------------------------------------------------------------


def test_an_hour_is_skipped_and_the_payload_comes_back_as_the_values_it_was() -> None:
    begun_at = time.monotonic()
    assert run_trigger(Sleeper()) == [TriggerEvent({"slept": HOUR, "pair": (1, 2)})]
    assert time.monotonic() - begun_at < 10


def test_so_many_events_as_are_wanted_and_no_more() -> None:
    assert [event.payload for event in run_trigger(Beat(), events=3)] == [0, 1, 2]
    assert len(run_trigger(Endless(), events=7)) == 7


def test_all_events_of_an_hour() -> None:
    fired = run_trigger(Beat(), within=HOUR)
    assert [event.payload for event in fired] in (list(range(60)), list(range(61)))


def test_a_trigger_goes_on_from_its_last_event() -> None:
    assert run_trigger(Beat(), events=2, last_event=TriggerEvent(41)) == [
        TriggerEvent(42, key="42"),
        TriggerEvent(43, key="43"),
    ]


def test_the_end_of_a_task_comes_back_as_what_it_was() -> None:
    (event,) = run_trigger(Succeeding())
    assert isinstance(event, TaskSuccessEvent)
    assert event.xcoms == {"rows": 3}


def test_the_wall_clock_of_its_module_skips_along() -> None:
    real = datetime.now()
    (event,) = run_trigger(WallClock())
    assert event.payload["waited"] == HOUR
    assert event.payload["stamp_s"] == pytest.approx(3600)
    assert event.payload["at"] - real > HOUR - timedelta(minutes=1)
    assert datetime.now() - real < HOUR, "and is itself again afterwards"
    assert type(datetime.now()) is datetime


def test_the_triggers_that_come_with_headgate_run(tmp_path: Path) -> None:
    assert len(run_trigger(TimeDeltaTrigger(HOUR))) == 1
    moment = datetime.now(UTC) + 5 * HOUR
    assert run_trigger(DateTimeTrigger(moment)) == [TriggerEvent(moment, key=moment.isoformat())]
    (tmp_path / "there").touch()
    (event,) = run_trigger(FileTrigger(tmp_path / "there"))
    assert event.payload["path"] == str(tmp_path / "there")


def test_a_thread_that_works_is_waited_for() -> None:
    (event,) = run_trigger(Threaded())
    assert event.payload == 0.0


def test_a_server_that_answers_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(1).replace(b"?", b"!"))

        thread = threading.Thread(target=answer)
        thread.start()
        (event,) = run_trigger(Asking(port=server.getsockname()[1]))
        thread.join()
    assert event.payload == b"!"


def test_cleanup_is_called_and_may_wait() -> None:
    assert len(run_trigger(CleansUp(), events=1)) == 1


# --- what is wrong with a bad one ----------------------------------------------------------------


def test_kwargs_without_a_form_are_named() -> None:
    with pytest.raises(RoundTripFailed, match=r"kwargs\['callback'\] is a"):
        run_trigger(Sleeper(callback=print))


def test_an_argument_that_serialize_leaves_out_is_named() -> None:
    assert Forgetful("u").timeout_s == 5
    with pytest.raises(RoundTripFailed, match=r"Forgetful\.timeout_s .* 30 becomes 5\.0"):
        run_trigger(Forgetful("u", timeout_s=30))


def test_an_argument_that_is_kept_in_private_and_left_out_is_named() -> None:
    with pytest.raises(RoundTripFailed, match=r"Secretive\._timeout_s .* 30\.0 becomes 5\.0; does serialize"):
        run_trigger(Secretive(timeout_s=30.0))


def test_an_argument_without_a_form_that_is_left_out_is_named() -> None:
    with pytest.raises(RoundTripFailed, match=r"Secretive\.on_event .* becomes None; does serialize"):
        run_trigger(Secretive(on_event=print))


def test_what_is_made_of_an_argument_that_is_stored_is_the_authors_affair() -> None:
    assert run_trigger(Secretive(pattern="*.csv")) == [TriggerEvent("*.csv")]


def test_what_is_another_each_time_the_trigger_is_made_is_the_authors_affair() -> None:
    assert run_trigger(Defaulting()) == [TriggerEvent("made")]
    with pytest.raises(RoundTripFailed, match=r"Defaulting\.name does not survive"):
        run_trigger(Defaulting(name="mine"))


def test_an_argument_by_a_wrong_name_is_named() -> None:
    with pytest.raises(RoundTripFailed, match=r"cannot be constructed from its kwargs \(uri\)"):
        run_trigger(Renaming("u"))


def test_kwargs_that_change_are_named() -> None:
    with pytest.raises(RoundTripFailed, match=r"kwargs\['url'\] of Growing .* 'u/' becomes 'u//'"):
        run_trigger(Growing("u"))


def test_a_class_inside_a_function_is_refused() -> None:
    class Local(Sleeper):
        def serialize(self) -> tuple[str, dict[str, Any]]:
            return f"{__name__}.{type(self).__qualname__}", {}

    with pytest.raises(RoundTripFailed, match="inside a function"):
        run_trigger(Local())


def test_what_a_trigger_raises_is_the_cause_and_its_events_are_there() -> None:
    with pytest.raises(TriggerFailed, match="ValueError: no more") as failed:
        run_trigger(Raising())
    assert isinstance(failed.value.__cause__, ValueError)
    assert failed.value.events == [TriggerEvent("before")]


def test_returning_before_the_first_event_fails() -> None:
    with pytest.raises(TriggerFailed, match="returned before its first event"):
        run_trigger(Returning())


def test_one_that_has_fired_earlier_may_return_without_an_event() -> None:
    assert run_trigger(Returning(), last_event=TriggerEvent(1)) == []
    with pytest.raises(TooFewEvents, match="fired 0 of 1"):
        run_trigger(Returning(), last_event=TriggerEvent(1), events=1)
    with pytest.raises(TooFewEvents, match="fired 0 of at least 1"):
        run_trigger(Silent(), last_event=TriggerEvent(1), within=HOUR)


def test_an_event_after_the_last_one_fails() -> None:
    with pytest.raises(TriggerFailed, match=r"FiredAfterLast: .*TooLong fired an event after"):
        run_trigger(TooLong())


def test_silence_fails_when_the_time_is_over() -> None:
    with pytest.raises(TooFewEvents, match="fired 0 of at least 1"):
        run_trigger(Silent(), within=HOUR)
    with pytest.raises(TooFewEvents, match=r"fired 6[01] of 100"):
        run_trigger(Beat(), events=100, within=HOUR)


def test_an_endless_one_must_say_how_much_is_enough() -> None:
    with pytest.raises(AssertionError, match="does not end: limit their number"):
        run_trigger(Endless())


def test_a_step_that_blocks_is_named_by_its_line() -> None:
    with pytest.raises(LoopBlocked, match=r"test_running\.py:\d+ in run") as blocked:
        run_trigger(Blocking(seconds=0.6), blocked_after=timedelta(seconds=0.2))
    assert "time.sleep(self._kwargs" in str(blocked.value)


def test_a_step_that_blocks_for_ever_is_given_up() -> None:
    begun_at = time.monotonic()
    try:
        with pytest.raises(LoopBlocked):
            run_trigger(BlockingForEver())
        assert time.monotonic() - begun_at < 30, "long before it would have let go by itself"
    finally:
        BlockingForEver.let_go.set()


@pytest.mark.parametrize(
    ("trigger", "what"),
    [(DropsASocket(), "unclosed <socket"), (KeepsASocket(), "a socket"), (LeavesATask(), "the task forgotten")],
    ids=["dropped socket", "kept socket", "task"],
)
def test_what_is_left_behind_is_named(trigger: BaseTrigger, what: str) -> None:
    with pytest.raises(LeftBehind, match=what):
        run_trigger(trigger)
    if isinstance(trigger, KeepsASocket):
        KeepsASocket.kept.close()


def test_a_hook_that_fails_fails_the_test() -> None:
    with pytest.raises(Misbehaved, match="a hook failed") as failed:
        run_trigger(FailsToCleanUp(), events=1)
    assert "the server is gone" in str(failed.value)


def test_an_exception_while_it_is_cancelled_fails_the_test() -> None:
    with pytest.raises(TriggerFailed, match="it is not open"):
        run_trigger(FailsToClose(), events=1)


def test_a_trigger_that_swallows_its_cancellation_fails() -> None:
    with pytest.raises(Misbehaved, match="does not end when it is cancelled"):
        run_trigger(Stubborn(), events=1)


def test_an_event_that_cannot_be_stored_fails() -> None:
    with pytest.raises(Misbehaved, match=r"payload\['callback'\]"):
        run_trigger(FiresNonsense())


# --- the plugin ----------------------------------------------------------------------------------


def test_the_plugin_loads_nothing_until_it_is_used() -> None:
    program = "import sys, headgate.testing.plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "headgate.testing.plugin" in loaded
    assert not {"trio", "msgspec", "structlog", "psutil", "rich"} & {name.partition(".")[0] for name in loaded}


def test_the_door_names_only_what_exists() -> None:
    import headgate.testing

    assert sorted(headgate.testing.__all__) == list(headgate.testing.__all__)
    assert [name for name in headgate.testing.__all__ if not hasattr(headgate.testing, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = headgate.testing.nothing
