"""Frames: whatever way a stream is split, the same frames come out, and no garbage does any harm."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.errors import FrameTooLong, LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.framing import FRAME_LIMIT_MAX, HEADER_BYTES, FrameReader, encode_frame

LIMIT = 64
BODIES = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=8)


def taken(reader: FrameReader) -> list[bytes]:
    return list(iter(reader.next_frame, None))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(bodies=BODIES, cuts=st.lists(st.integers(min_value=0), max_size=20))
def test_any_split_of_the_stream_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader(LIMIT)
    frames = []
    for chunk in split(b"".join(encode_frame(body, LIMIT) for body in bodies), cuts):
        reader.feed(chunk)
        frames += taken(reader)
    reader.receive_eof()
    assert frames == bodies
    assert reader.at_eof


@given(chunks=st.lists(st.binary(max_size=3 * LIMIT), max_size=20))
def test_garbage_raises_nothing_but_a_remote_error_and_memory_stays_bounded(chunks: list[bytes]) -> None:
    reader = FrameReader(LIMIT)
    try:
        for chunk in chunks:
            reader.feed(chunk)
            assert reader.buffered_bytes <= HEADER_BYTES + LIMIT + len(chunk)
            for frame in taken(reader):
                assert 1 <= len(frame) <= LIMIT
        reader.receive_eof()
    except RemoteProtocolError:
        held = reader.buffered_bytes
        with pytest.raises(RemoteProtocolError):
            reader.next_frame()
        assert reader.buffered_bytes == held


@pytest.mark.parametrize("declared", [LIMIT + 1, 2**31, FRAME_LIMIT_MAX])
def test_a_length_over_the_limit_is_refused_before_its_body_is_waited_for(declared: int) -> None:
    reader = FrameReader(LIMIT)
    header = declared.to_bytes(4, "big")
    reader.feed(header[:3])
    with pytest.raises(RemoteProtocolError, match=rf"{declared:,} bytes; the limit is 64"):
        reader.feed(header[3:])
    with pytest.raises(RemoteProtocolError):
        reader.feed(b"x" * 1000)
    assert reader.buffered_bytes == HEADER_BYTES


def test_a_frame_before_a_bad_one_is_still_given() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(encode_frame(b"good", LIMIT) + b"\xff\xff\xff\xff")
    assert reader.next_frame() == b"good"
    with pytest.raises(RemoteProtocolError):
        reader.next_frame()


def test_a_frame_of_exactly_the_limit_passes() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(encode_frame(b"x" * LIMIT, LIMIT))
    assert reader.next_frame() == b"x" * LIMIT


def test_an_empty_frame_is_malformed_and_cannot_be_made() -> None:
    with pytest.raises(RemoteProtocolError, match="empty frame"):
        FrameReader(LIMIT).feed(bytes(4))
    with pytest.raises(LocalProtocolError, match="empty"):
        encode_frame(b"", LIMIT)


def test_a_body_over_the_limit_is_not_made_into_a_frame_and_the_error_names_the_message() -> None:
    with pytest.raises(FrameTooLong, match="StateSync needs a frame of 65 bytes; the limit is 64") as caught:
        encode_frame(b"x" * 65, LIMIT, message_name="StateSync")
    assert (caught.value.frame_bytes, caught.value.frame_bytes_max) == (65, 64)


@pytest.mark.parametrize("kept", range(1, HEADER_BYTES + 5))
def test_an_end_within_a_frame_is_a_remote_error_at_every_byte(kept: int) -> None:
    reader = FrameReader(LIMIT)
    reader.feed(encode_frame(b"12345", LIMIT)[:kept])
    with pytest.raises(RemoteProtocolError, match="within a frame"):
        reader.receive_eof()


def test_an_end_behind_whole_frames_lets_them_be_taken_first() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(encode_frame(b"one", LIMIT) + encode_frame(b"two", LIMIT)[:-1])
    reader.receive_eof()
    assert not reader.at_eof
    assert reader.next_frame() == b"one"
    with pytest.raises(RemoteProtocolError, match="within a frame"):
        reader.next_frame()


def test_feeding_on_without_taking_frames_is_refused_at_the_memory_bound() -> None:
    reader = FrameReader(LIMIT)
    frame = encode_frame(b"x" * LIMIT, LIMIT)
    reader.feed(frame)
    with pytest.raises(LocalProtocolError, match="before the frames"):
        reader.feed(frame)
    assert taken(reader) == [b"x" * LIMIT]
    reader.feed(frame)
    assert taken(reader) == [b"x" * LIMIT]


def test_feeding_after_the_end_is_refused() -> None:
    reader = FrameReader(LIMIT)
    reader.receive_eof()
    reader.receive_eof()
    with pytest.raises(LocalProtocolError, match="after the end"):
        reader.feed(b"x")


@pytest.mark.parametrize("limit", [0, -1, FRAME_LIMIT_MAX + 1])
def test_a_limit_the_length_field_cannot_hold_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="frame limit"):
        FrameReader(limit)
    reader = FrameReader(LIMIT)
    with pytest.raises(ValueError, match="frame limit"):
        reader.frame_bytes_max = limit
    assert reader.frame_bytes_max == LIMIT
