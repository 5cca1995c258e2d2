"""The record of a black box: it comes out as it went in, and garbage comes out as nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.black_box import BOX_BYTES, Record, begin_record, end_record, read_record
from headgate.protocol.messages.runner import KEY_CHARS_MAX


@given(st.text(st.characters(codec="utf-8"), max_size=KEY_CHARS_MAX) | st.none(), st.binary(max_size=100))
def test_a_record_is_read_as_it_was_written_whatever_follows_it(key: str | None, rest: bytes) -> None:
    record = Record("7.1.42.3", key)
    data = begin_record(record.trigger_run_id) + end_record(key)
    assert len(data) < BOX_BYTES
    assert read_record(data + rest) == record


@given(st.binary(max_size=BOX_BYTES))
def test_garbage_never_raises(data: bytes) -> None:
    found = read_record(data)
    assert found is None or isinstance(found, Record)
    read_record(b"\x01" + data)


@given(st.binary(min_size=1, max_size=200), st.integers(min_value=0, max_value=200))
def test_a_scribbled_record_never_raises(noise: bytes, at: int) -> None:
    data = bytearray((begin_record("7.1.42.3") + end_record("berlin:4711")).ljust(BOX_BYTES, b"\0"))
    data[at : at + len(noise)] = noise
    read_record(bytes(data[:BOX_BYTES]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\0" * BOX_BYTES,
        b"\x01",
        b"\x01\xff\xfe",
        b"\x01run\xffkey",
        b"\x01" + b"x" * 256 + b"\xff\xfe",
        b"\x01run\xff" + b"x" * 70_000 + b"\xff",
    ],
)
def test_an_empty_or_impossible_box_names_nobody(data: bytes) -> None:
    assert read_record(data) is None


@pytest.mark.parametrize("key", ["\ud800", "x" * (KEY_CHARS_MAX + 1)])
def test_a_key_that_cannot_be_written_is_left_out(key: str) -> None:
    assert read_record(begin_record("run") + end_record(key)) == Record("run")
