"""What is fuzzed: each target takes bytes from nobody knows where, and must end in one of its documented errors.

A target returns in a few words what became of its input; inputs with outcomes never seen before are kept and
mutated further. It raises where a promise is broken: an error that is not documented, memory beyond its bound, a
value that does not come back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import socket
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import trio
import trio.testing
from sqlalchemy import Engine, delete

from headgate.child.parent_death import SupervisorGone
from headgate.protocol.errors import (
    FrameLogError,
    RemoteProtocolError,
    ValueMalformed,
    ValueNotSerializable,
)
from headgate.protocol.framelog.log import Record, describe, read_frames, verify
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.framing import HEADER_BYTES, FrameReader
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, RunnerDialect
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages.queries import Request, Response
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FromRunner,
    FromSupervisor,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.link import AsyncLink
from headgate.runner.session import shake_hands
from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.errors import StoreError
from headgate.store.tables import metadata
from headgate.supervisor.children import link as supervisor_link
from headgate.supervisor.commands import Exit, Kill
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.replay.run import LogIncomplete, ReplayStore, ReplayStuck, replay
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

FRAME_BYTES_MAX = 64 * 1024  # the limit of the fuzzed links: small, so that inputs come near it
INCARNATION = 1  # of the fuzzed conversations, as in the golden captures
HANG_S = 30.0  # an input that takes longer hangs, even on a busy machine
# What handling an input may allocate, beside a multiple of it: a decoded message is many small objects.
MEMORY_BYTES_MAX = 16 * 1024 * 1024
MEMORY_PER_INPUT_BYTE = 200
STEPS_MAX = 10_000  # of a core after one message: more is a loop without end

Target = Callable[[bytes], str]


def _outcome(error: Exception) -> str:
    """Return the kind of an error: its text without numbers and quotations."""
    text = re.sub(r"'[^']*'|b'.*'|\"[^\"]*\"", "'...'", str(error))
    return f"{type(error).__name__}: {re.sub('[0-9][0-9,]*', 'N', text)[:120]}"


def _reads(data: bytes) -> Iterator[bytes]:
    """Cut a stream into reads of many sizes, the same ones for the same input."""
    start, size = 0, 1 + sum(data[:8]) % 4096
    while start < len(data):
        yield data[start : start + size]
        start, size = start + size, 1 + (size * 7 + 3) % 5000


# --- protocol ------------------------------------------------------------------------------------


def framing(data: bytes) -> str:
    """A stream of frames, in reads of any size, with a small limit."""
    limit = 1 + (data[0] if data else 0) * 16
    reader, frames = FrameReader(limit), 0
    try:
        for read in _reads(data[1:]):
            reader.feed(read)
            assert reader.buffered_bytes <= HEADER_BYTES + limit + len(read), "more is buffered than a frame and a read"
            while (body := reader.next_frame()) is not None:
                assert 1 <= len(body) <= limit
                frames += 1
        reader.receive_eof()
    except RemoteProtocolError as error:
        return _outcome(error)
    return f"{min(frames, 10)} frames"


def message(data: bytes) -> str:
    """One body, of either direction."""
    role = Role.RUNNER if data[:1] < b"\x80" else Role.SUPERVISOR
    try:
        decoded = RUNNER_WIRE.decode(role, data[1:])
    except RemoteProtocolError as error:
        return _outcome(error)
    encoded = encode_message(decoded)
    assert encode_message(RUNNER_WIRE.decode(role, encoded)) == encoded, "it does not come back as it was"
    return type(decoded).__name__


def conversation_of_runner(data: bytes) -> str:
    """What a runner sends, at the supervisor's connection, which answers."""
    connection = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR, frame_bytes_max=FRAME_BYTES_MAX)
    heard = []
    try:
        for read in _reads(data):
            connection.receive_data(read)
            while (said := connection.next_message()) is not None:
                heard.append(type(said).__name__)
                match said:
                    case Hello():
                        settings = RunnerSettings(frame_bytes_max=FRAME_BYTES_MAX)
                        connection.send(Welcome(PROTOCOL_VERSION, INCARNATION, settings))
                    case StateChanges():
                        connection.send(StateSync(said.round))
                    case Request():
                        connection.send(Response(said.id))
        connection.receive_eof()
    except RemoteProtocolError as error:
        assert _is_broken(connection), "a broken connection goes on"
        return f"{heard[-2:]} {_outcome(error)}"
    return f"{heard[-3:]}"


def _is_broken(connection: Connection[FromSupervisor, FromRunner]) -> bool:
    try:
        connection.receive_data(b"")
    except RemoteProtocolError:
        return True
    return False


def conversation_of_supervisor(data: bytes) -> str:
    """What a supervisor sends, at the runner's connection, which has said hello and reported a round."""
    connection = Connection(RunnerDialect(INCARNATION), Role.RUNNER, frame_bytes_max=FRAME_BYTES_MAX)
    connection.send(Hello(PROTOCOL_VERSION, INCARNATION, 1, "0"))
    heard = []
    try:
        for read in _reads(data):
            connection.receive_data(read)
            while (said := connection.next_message()) is not None:
                heard.append(type(said).__name__)
                assert isinstance(said, Welcome | StateSync | Response | Drain)
        connection.receive_eof()
    except RemoteProtocolError as error:
        return f"{heard[-2:]} {_outcome(error)}"
    return f"{heard[-3:]}"


@cache
def _folder() -> Path:
    """A folder for files that targets read; it goes with the process."""
    temporary = tempfile.TemporaryDirectory(prefix="headgate-fuzz-")
    _folders.append(temporary)
    return Path(temporary.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def frame_log(data: bytes) -> str:
    """A file that may be a frame log: read, described, verified."""
    path = _folder() / "fuzzed.hgframe"
    path.write_bytes(data)
    try:
        items = list(read_frames(path))
        findings = verify(path).findings
    except FrameLogError as error:
        return re.sub(r"/\S*", "FILE", _outcome(error))
    for item in items:
        assert 0 <= item.offset <= len(data)
        if isinstance(item, Record):
            describe(item)
    assert sum(len(item.body) for item in items if isinstance(item, Record)) <= len(data)
    assert all(one.offset < other.offset for one, other in pairwise(items)), "records overlap"
    kinds = sorted({type(item).__name__ for item in items})
    return f"{kinds} {sorted({re.sub('[0-9][0-9,.]*', 'N', finding.problem)[:60] for finding in findings})[:3]}"


def value(data: bytes) -> str:
    """Bytes that may be an author's value."""
    try:
        decoded = decode_value(data)
    except ValueMalformed as error:
        return _outcome(error)
    try:
        encoded = encode_value(decoded, where="value")
    except ValueNotSerializable as error:
        # The decoder is more patient than the encoder with what is nested deeply.
        return _outcome(error)
    assert encode_value(decode_value(encoded), where="value") == encoded, "it does not come back as it was"
    return type(decoded).__name__


# --- links ---------------------------------------------------------------------------------------


def link_of_supervisor(data: bytes) -> str:
    """What a runner sends, on a real socket, at the supervisor's end."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR, frame_bytes_max=FRAME_BYTES_MAX)
        link = supervisor_link.RunnerLink(ours, connection, "runner")
        heard = 0
        # A runner says hello and waits: what came in the same read as its hello would be out of order.
        hello_bytes = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
        try:
            for read in (data[:hello_bytes][:FRAME_BYTES_MAX], *_reads(data[hello_bytes:])):
                theirs.sendall(read)
                for said in link.receive():
                    heard += 1
                    if isinstance(said, Hello):
                        settings = RunnerSettings(frame_bytes_max=FRAME_BYTES_MAX)
                        link.send(Welcome(PROTOCOL_VERSION, INCARNATION, settings))
            theirs.shutdown(socket.SHUT_WR)
            assert link.receive() == []
            assert link.is_ended
        except RemoteProtocolError as error:
            return _outcome(error)
        finally:
            link.close()
    return f"{min(heard, 10)} messages"


def link_of_runner(data: bytes) -> str:
    """What a supervisor sends, at the runner's end: the handshake, then everything that follows."""
    return trio.run(_listen, data)


async def _listen(data: bytes) -> str:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = Connection(RunnerDialect(INCARNATION), Role.RUNNER, frame_bytes_max=FRAME_BYTES_MAX)
    link = AsyncLink(ours, connection)
    await theirs.send_all(data)
    await theirs.send_eof()
    heard = 0
    try:
        await shake_hands(link, INCARNATION)
        while True:
            link._round = link._answered_round + 1  # as if a round had been sent
            said = await link.receive()
            heard += 1
            match said:
                case StateSync():
                    link.note_answer(said)
                case Response():
                    link.note_response(said)
                case _:
                    pass
    except SupervisorGone:
        return f"{min(heard, 10)} messages"
    except RemoteProtocolError as error:
        return _outcome(error)


# --- supervisor ----------------------------------------------------------------------------------


@cache
def _engine() -> Engine:
    """The database of all inputs, in memory; what costs time is to make one, and to compile its statements."""
    engine = open_engine("sqlite://")
    schema.upgrade(engine)
    return engine


def _fresh_store() -> ReplayStore:
    """Return a store without rows."""
    with _engine().begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
    return ReplayStore(_engine())


def core(data: bytes) -> str:
    """What a runner sends, at the core of a supervisor with a real store behind it."""
    connection = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR, frame_bytes_max=FRAME_BYTES_MAX)
    heard: list[str] = []
    with contextlib.closing(_fresh_store()) as store:
        settings = CoreSettings(runner=RunnerSettings(), lease=LeaseTimes(1e9, 1e9, 1e9))
        who = Identity("fuzz", 0, "fuzz", 0.0)
        supervisor = SupervisorCore(store, who, settings, is_gone=lambda row: False)
        # The runs of the captures are those of epoch 1, whose triggers have these ids.
        for number in (1, 2):
            store.make(TriggerSpec(number, "", f"watcher-{number}", "users.Trigger", b"{}"))
        store.allow((1, 2))
        try:
            _settle(supervisor)
            for read in _reads(data):
                connection.receive_data(read)
                while (said := connection.next_message()) is not None:
                    heard.append(type(said).__name__)
                    supervisor.receive(INCARNATION, said, 1.0)
                    if isinstance(said, Hello):
                        connection.send(Welcome(PROTOCOL_VERSION, INCARNATION, RunnerSettings()))
                    _settle(supervisor)
            supervisor.runner_ended(INCARNATION, "the input ends", 2.0)
            _settle(supervisor)
        except RemoteProtocolError as error:
            return f"{heard[-2:]} {_outcome(error)}"
        assert store.fault is None, store.fault
        return f"{heard[-2:]} {len(list(store.inspect.events())) > 0} {len(store.inspect.dead_letters()) > 0}"


def _settle(supervisor: SupervisorCore) -> None:
    for _ in range(STEPS_MAX):
        out = supervisor.step(1.0)
        if any(isinstance(command, Exit | Kill) for command in out):
            return
        if not out and supervisor.wake_at() > 1.0:
            return
    raise AssertionError("the core does not come to rest")


def replayed(data: bytes) -> str:
    """A file that may be a frame log, replayed on a fresh database."""
    path = _folder() / "replayed.hgframe"
    path.write_bytes(data)
    with contextlib.closing(_fresh_store()) as store:
        try:
            result = replay([path], store)
        except (FrameLogError, LogIncomplete, ReplayStuck, StoreError) as error:
            return re.sub(r"/\S*", "FILE", _outcome(error))
    if result.difference is None:
        return "clean"
    return _outcome(ValueError(result.difference.problem))


TARGETS: dict[str, Target] = {
    "framing": framing,
    "message": message,
    "conversation-of-runner": conversation_of_runner,
    "conversation-of-supervisor": conversation_of_supervisor,
    "frame-log": frame_log,
    "value": value,
    "link-of-supervisor": link_of_supervisor,
    "link-of-runner": link_of_runner,
    "core": core,
    "replay": replayed,
}


# --- checking ------------------------------------------------------------------------------------


class Broken(Exception):
    """An input that broke a promise."""

    def __init__(self, target: str, data: bytes) -> None:
        super().__init__(target)
        self.target = target
        self.data = data


def check(name: str, data: bytes, *, measured: bool) -> str:
    """Give an input to a target; return the outcome. Raises `Broken`."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        if not measured:
            return TARGETS[name](data)
        tracemalloc.start()
        try:
            outcome = TARGETS[name](data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        allowed = MEMORY_BYTES_MAX + MEMORY_PER_INPUT_BYTE * len(data)
        assert peak <= allowed, f"{peak:,} bytes of memory for an input of {len(data):,}"
        return outcome
    except Exception as error:
        raise Broken(name, data) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
