"""Frame log files: what was recorded is there, whatever happened to the writer, and no secret is."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from headgate.protocol import Direction
from headgate.protocol.errors import FrameLogError
from headgate.protocol.framelog import file as framefile
from headgate.protocol.framelog.log import (
    Damaged,
    FrameLogWriter,
    Record,
    Torn,
    encode_record,
    mask,
    read_frames,
    verify,
)
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FiredEvent,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)

FROM_RUNNER, FROM_SUPERVISOR = Direction.FROM_RUNNER, Direction.FROM_SUPERVISOR
FILE_HEADER_BYTES = 16
GOLDEN = Path(__file__).parents[2] / "replay" / "captured" / "conversation-v3.hgframe"

SPEC = TriggerSpec(9, "run-9", "orders", "triggers.Orders", b'{"password":"swordfish"}')
CONVERSATION: list[Message] = [
    Hello(PROTOCOL_VERSION, 1, 4711, "0.1.0"),
    Welcome(PROTOCOL_VERSION, 1, RunnerSettings(round_events_max=1000)),
    StateSync(to_create=(SPEC,)),
    StateChanges(1, events=(FiredEvent(9, "run-9", 0, 1, b'{"order":17}', "orders-0.jsonl:0"),)),
    StateSync(1, persisted=(1,)),
    Drain(30.0),
    StateChanges(2),
    StateSync(2),
]


def clock() -> Iterator[float]:
    return itertools.count(1_750_000_000.0, 0.25)


def record(writer: FrameLogWriter, message: Message, *, incarnation: int = 1) -> None:
    direction = next(d for d in Direction if type(message) in RUNNER_WIRE.types[d.sender])
    writer.record(direction, incarnation, message, encode_message(message))


def write(folder: Path, messages: list[Message] = CONVERSATION) -> Path:
    writer = FrameLogWriter(folder, clock=clock().__next__)
    for message in messages:
        record(writer, message)
    writer.close()
    return writer.path


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    records = list(read_frames(write(tmp_path)))
    assert all(isinstance(r, Record) for r in records)
    assert [r.message() for r in records if isinstance(r, Record)] == [mask(message) for message in CONVERSATION]
    assert [(r.time, r.direction, r.incarnation) for r in records if isinstance(r, Record)][:2] == [
        (1_750_000_000.0, FROM_RUNNER, 1),
        (1_750_000_000.25, FROM_SUPERVISOR, 1),
    ]


def test_a_record_is_in_the_file_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path)
    record(writer, CONVERSATION[0])
    assert [r.message() for r in read_frames(writer.path) if isinstance(r, Record)] == CONVERSATION[:1]
    writer.close()


def test_the_format_is_what_it_was(tmp_path: Path) -> None:
    """A log taken in production is read by later versions: the golden files are never changed."""
    assert write(tmp_path).read_bytes() == GOLDEN.read_bytes()
    assert verify(GOLDEN).findings == ()
    messages = [record.message() for record in read_frames(GOLDEN) if isinstance(record, Record)]
    assert messages == [mask(message) for message in CONVERSATION]


def test_a_log_of_before_fields_were_appended_is_read_with_their_defaults(tmp_path: Path) -> None:
    """As a headgate wrote it whose StateSync ended with ``more``."""
    writer = FrameLogWriter(tmp_path)
    writer.close()
    older = writer.path.read_bytes()
    for item in read_frames(GOLDEN):
        assert isinstance(item, Record)
        body = item.body
        if isinstance(item.message(), StateSync):
            body = msgspec.msgpack.encode(msgspec.msgpack.decode(body)[:-5])
        older += encode_record(item.time, item.direction, item.incarnation, body)
    writer.path.write_bytes(older)
    assert verify(writer.path).findings == ()
    messages = [record.message() for record in read_frames(writer.path) if isinstance(record, Record)]
    assert messages == [mask(message) for message in CONVERSATION]


# --- secrets ---------------------------------------------------------------------------------------


def test_no_kwargs_are_in_the_file_in_clear(tmp_path: Path) -> None:
    """I12, for both sides of a link: the kwargs are masked whoever records them."""
    data = write(tmp_path).read_bytes()
    assert b"swordfish" not in data
    assert b"triggers.Orders" in data
    assert b"masked: 24 bytes" in data


def test_masking_changes_nothing_else() -> None:
    sync = StateSync(3, persisted=(1,), to_create=(SPEC, SPEC), more=True)
    masked = mask(sync)
    assert isinstance(masked, StateSync)
    assert {spec.kwargs for spec in masked.to_create} == {b'"masked: 24 bytes"'}
    assert (masked.round, masked.persisted, len(masked.to_create), masked.more) == (3, (1,), 2, True)
    assert masked.to_create[0].classpath == SPEC.classpath
    for message in CONVERSATION:
        assert mask(message) is message or (isinstance(message, StateSync) and message.to_create)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "new" / "folder")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


# --- crashes and damage ----------------------------------------------------------------------------


def test_a_torn_last_record_is_reported_and_skipped_at_every_byte(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    last = [r.offset for r in read_frames(path)][-1]
    for end in range(last + 1, len(data)):
        path.write_bytes(data[:end])
        *whole, torn = read_frames(path)
        assert torn == Torn(last, end - last)
        assert [r.message() for r in whole if isinstance(r, Record)] == [mask(m) for m in CONVERSATION[:-1]]
        verification = verify(path)
        assert verification.ok
        assert [finding.severity for finding in verification.findings] == ["warning"]


def test_a_file_whose_header_is_torn_is_read_as_empty(tmp_path: Path) -> None:
    path = write(tmp_path, [])
    data = path.read_bytes()
    assert len(data) == FILE_HEADER_BYTES
    assert list(read_frames(path)) == []
    for end in range(FILE_HEADER_BYTES):
        path.write_bytes(data[:end])
        assert list(read_frames(path)) == [Torn(0, end)]
        assert verify(path).ok


def test_one_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            if position < FILE_HEADER_BYTES:
                with pytest.raises(FrameLogError):
                    verify(path)
            else:
                assert not verify(path).ok, position


def test_damage_in_a_body_costs_that_record_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    offsets = [r.offset for r in read_frames(path)]
    data = bytearray(path.read_bytes())
    data[offsets[4] - 5] ^= 0xFF
    path.write_bytes(data)
    records = list(read_frames(path))
    assert records[3] == Damaged(offsets[3], "the CRC of the record does not match", True)
    assert [r.offset for r in records] == offsets
    findings = verify(path).findings
    assert [(finding.offset, finding.severity) for finding in findings] == [(offsets[3], "error")]


def test_damage_in_a_header_ends_the_reading_with_its_offset(tmp_path: Path) -> None:
    path = write(tmp_path)
    offsets = [r.offset for r in read_frames(path)]
    data = bytearray(path.read_bytes())
    data[offsets[3]] ^= 0x40  # a length beyond the end of the file
    path.write_bytes(data)
    records = list(read_frames(path))
    assert len(records) == 4
    assert isinstance(records[3], Damaged)
    assert (records[3].offset, records[3].goes_on) == (offsets[3], False)


def test_a_direction_that_is_none_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, [])
    good = encode_record(1.0, FROM_RUNNER, 1, b"x")
    header = bytearray(good[:21])
    header[20] = 3
    bad = bytes(header) + crc32(header).to_bytes(4, "big") + b"x"
    path.write_bytes(path.read_bytes() + bad + crc32(bad).to_bytes(4, "big") + good)
    damaged, record_ = read_frames(path)
    assert damaged == Damaged(FILE_HEADER_BYTES, "3 is not a direction", True)
    assert isinstance(record_, Record)


@pytest.mark.parametrize("data", [b"PK\x03\x04 not at all", b"\x89PNG\r\n\x1a\n0000", b"{}"])
def test_a_file_that_is_no_frame_log_is_named_at_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "picture.hgframe"
    path.write_bytes(data)
    for read in (read_frames, verify):
        with pytest.raises(FrameLogError, match=r"picture\.hgframe is not a frame log"):
            read(path)


def test_a_later_format_is_named_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "later.hgframe"
    header = b"\x89HGF\r\n\x1a\n\x00\x02\x00\x00"
    path.write_bytes(header + crc32(header).to_bytes(4, "big"))
    with pytest.raises(FrameLogError, match="format version 2; this headgate reads version 1"):
        read_frames(path)


# --- bounds ----------------------------------------------------------------------------------------


def test_a_file_rotates_before_it_grows_over_its_limit(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path, file_bytes_max=300, files_max=100)
    for number in range(1, 31):
        record(writer, StateChanges(number))
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    assert all(path.stat().st_size <= 300 for path in files)
    rounds = [r.message().round for path in files for r in read_frames(path) if isinstance(r, Record)]  # type: ignore[union-attr]
    assert rounds == list(range(1, 31))
    assert writer.path == files[-1]


def test_a_rotated_file_is_no_error_for_beginning_within_a_conversation(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path, file_bytes_max=150, files_max=100)
    for message in CONVERSATION:
        record(writer, message)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert [verify(path).findings for path in files] == [()] * len(files)


def test_a_record_longer_than_a_file_has_a_file_of_its_own(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path, file_bytes_max=100, files_max=100)
    for round_, size in ((1, 1), (2, 1000), (3, 1)):
        record(writer, StateChanges(round_, events=(FiredEvent(1, "r", 0, 1, bytes(size)),)))
    writer.close()
    assert [len(list(read_frames(path))) for path in sorted(tmp_path.iterdir())] == [1, 1, 1]


def test_the_oldest_files_are_removed_beyond_the_number_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    writer = FrameLogWriter(tmp_path, file_bytes_max=1, files_max=3)
    for number in range(1, 11):
        record(writer, StateChanges(number))
        assert len(list(tmp_path.glob("*.hgframe"))) <= 3
    writer.close()
    kept = [next(iter(read_frames(path))) for path in sorted(tmp_path.glob("*.hgframe"))]
    assert [r.message() for r in kept if isinstance(r, Record)] == [StateChanges(n) for n in (8, 9, 10)]
    assert (tmp_path / "notes.txt").exists()


def test_a_file_of_an_earlier_process_is_never_written_to(tmp_path: Path) -> None:
    first = write(tmp_path)
    before = first.read_bytes()
    second = write(tmp_path)
    assert second != first
    assert sorted([first, second]) == [first, second]
    assert first.read_bytes() == before


def test_two_writers_in_one_folder_never_share_a_file(tmp_path: Path) -> None:
    writers = [FrameLogWriter(tmp_path, file_bytes_max=1, files_max=100) for _ in range(2)]
    for number, writer in itertools.product(range(1, 4), writers):
        record(writer, StateChanges(number))
    for writer in writers:
        writer.close()
    found = [r.message() for path in tmp_path.iterdir() for r in read_frames(path) if isinstance(r, Record)]
    assert sorted(m.round for m in found if isinstance(m, StateChanges)) == [1, 1, 2, 2, 3, 3]


def test_a_name_taken_since_the_folder_was_listed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another supervisor may create a file between our look at the folder and our own file."""
    first = write(tmp_path)
    before = first.read_bytes()
    monkeypatch.setattr(framefile, "_numbered_files", lambda folder: {})
    second = write(tmp_path)
    assert second != first
    assert first.read_bytes() == before


# --- failures --------------------------------------------------------------------------------------


@contextmanager
def small_disk(bytes_max: int) -> Generator[None]:
    """A limit of the size of files stands in for a full disk: writes end short, then fail.

    It holds for the whole process, so no more than the writes under test may happen in it: pytest itself may be
    writing to a file.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_once_and_ends_the_recording(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path)
    record_bytes = len(encode_record(0.0, FROM_RUNNER, 1, encode_message(StateChanges(1))))
    disk_bytes = writer.path.stat().st_size + 2 * record_bytes + record_bytes // 2
    while writer.path.stat().st_size + record_bytes <= disk_bytes:
        record(writer, StateChanges(1))
    with small_disk(disk_bytes), pytest.raises(FrameLogError, match="no more frames are recorded"):
        record(writer, StateChanges(1))
    size = writer.path.stat().st_size
    assert size == disk_bytes
    record(writer, StateChanges(20))
    writer.close()
    assert writer.path.stat().st_size == size
    assert isinstance(list(read_frames(writer.path))[-1], Torn)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FrameLogError, match=r"frames cannot be recorded in .*file"):
        FrameLogWriter(tmp_path / "file")


def test_after_closing_nothing_is_recorded(tmp_path: Path) -> None:
    writer = FrameLogWriter(tmp_path)
    writer.close()
    writer.close()
    record(writer, StateChanges(1))
    assert list(read_frames(writer.path)) == []


@pytest.mark.parametrize("limits", [{"file_bytes_max": 0}, {"files_max": 0}])
def test_a_limit_of_nothing_is_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FrameLogWriter(tmp_path, **limits)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
