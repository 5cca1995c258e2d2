"""What users' code prints: every line a record, of whoever printed it, with nothing lost."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from headgate.child import output
from headgate.child.logs import RECORD_BYTES_MAX, naming_trigger
from headgate.child.output import PIECE_BYTES_MAX, captured, end_lines_of
from headgate.child.queries import secrets

ONE = {"trigger_id": 1, "trigger_name": "orders"}
OTHER = {"trigger_id": 2, "trigger_name": "stock"}


class Kept:
    """A channel that keeps the records."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def put(self, record: bytes) -> None:
        self.data += record.split(b"\n")

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data]

    @property
    def lines(self) -> list[str]:
        return [record["event"] for record in self.records]

    def whole_lines(self) -> list[str]:
        """The lines with their pieces joined, as a reader has to do it."""
        lines, begun = [], ""
        for record in self.records:
            begun += record["event"]
            if not record.get("more"):
                lines.append(begun)
                begun = ""
        assert not begun
        return lines


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def stream(kept: Kept, tmp_path: Path) -> Iterator[io.TextIOWrapper]:
    with (tmp_path / "original").open("w") as original:
        yield captured("stdout", original.fileno(), kept)
    assert (tmp_path / "original").read_text() == ""


def test_a_line_is_one_record_with_the_names_of_whoever_printed_it(stream: io.TextIOWrapper, kept: Kept) -> None:
    with naming_trigger(ONE):
        print("first", 2, file=stream)
        print("a", "b", sep="\n", file=stream)
    print(file=stream)
    assert kept.lines == ["first 2", "a", "b", ""]
    record = kept.records[0]
    assert record.pop("timestamp").endswith("Z")
    assert record == {"level": "info", "event": "first 2", "logger": "stdout", "source": "output", **ONE}
    assert "trigger_id" not in kept.records[3]


def test_triggers_that_print_bits_of_lines_in_turns_do_not_mix(stream: io.TextIOWrapper, kept: Kept) -> None:
    for bit in "abc":
        for names in (ONE, OTHER):
            with naming_trigger(names):
                print(bit, end="", file=stream)
    assert kept.lines == []
    end_lines_of(stream, OTHER)
    with naming_trigger(ONE):
        print(file=stream)
    assert [(record["event"], record["trigger_id"]) for record in kept.records] == [("abc", 2), ("abc", 1)]
    assert not any("more" in record for record in kept.records)


def test_threads_that_print_bits_of_lines_do_not_mix(stream: io.TextIOWrapper, kept: Kept) -> None:
    def bits() -> None:
        print("thread", end="", file=stream)

    print("main", end="", file=stream)
    thread = threading.Thread(target=bits)
    thread.start()
    thread.join()
    end_lines_of(stream)
    assert sorted(kept.lines) == ["main", "thread"]


@pytest.mark.parametrize("character", ["x", "\0", "ä", "€", "\U0001f600"])
@pytest.mark.parametrize("chunk_chars", [700_001, 1000])
def test_a_long_line_comes_in_pieces_and_not_a_byte_of_it_is_lost(
    stream: io.TextIOWrapper, kept: Kept, character: str, chunk_chars: int
) -> None:
    text = "begin " + character * 700_000 + " end"
    for begin in range(0, len(text), chunk_chars):
        stream.write(text[begin : begin + chunk_chars])
    stream.write("\nnext\n")
    assert max(map(len, kept.data)) <= RECORD_BYTES_MAX
    assert kept.whole_lines() == [text, "next"]
    *pieces, last, after = kept.records
    assert [piece["part"] for piece in (*pieces, last)] == list(range(1, len(pieces) + 2))
    assert len(last["event"].encode()) <= PIECE_BYTES_MAX
    assert "part" not in after


def test_bytes_survive_as_escapes(stream: io.TextIOWrapper, kept: Kept) -> None:
    stream.buffer.write(b"\xff\x00ok\r\n")
    stream.buffer.write(memoryview(b"\xc3"))  # type: ignore[arg-type]
    stream.buffer.write(b"\xa4\n")
    assert stream.buffer.write(bytearray(b"\x80" * 100_000 + b"\n")) == 100_001  # type: ignore[arg-type]
    stream.write("\udc80\ud800\n")
    first, second, third, fourth = kept.whole_lines()
    assert (first, second, third, fourth) == ("\\xff\0ok\r", "ä", "\\x80" * 100_000, "\\udc80\\ud800")


def test_what_is_flushed_is_said_at_once_and_goes_on_in_the_next_record(stream: io.TextIOWrapper, kept: Kept) -> None:
    print("50 %", end="", file=stream, flush=True)
    assert kept.lines == ["50 %"]
    stream.flush()
    print(" 100 %", file=stream, flush=True)
    print("next", file=stream)
    assert [(record["event"], record.get("part"), record.get("more")) for record in kept.records] == [
        ("50 %", 1, True),
        (" 100 %", 2, None),
        ("next", None, None),
    ]


def test_lines_that_nobody_ends_are_bounded_and_none_is_lost(
    stream: io.TextIOWrapper, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "OPEN_LINES_MAX", 3)
    everybody = [{"trigger_id": number} for number in range(10)]
    for names in everybody:
        with naming_trigger(names):
            stream.write("begun")
    assert [record["trigger_id"] for record in kept.records] == list(range(7))
    end_lines_of(stream)
    assert [record["trigger_id"] for record in kept.records] == list(range(10))


def test_it_is_a_text_stream_as_any_other(stream: io.TextIOWrapper, kept: Kept) -> None:
    assert stream.encoding == "utf-8"
    assert stream.writable()
    assert not stream.isatty()
    assert stream.name == "<stdout>"
    subprocess.run(["true"], stdout=stream, check=True)  # it has the descriptor of the process
    stream.reconfigure(line_buffering=True)
    stream.writelines(["a\n", "b\n"])
    stream.close()  # by a trigger that believes it is its own
    print("still there", file=stream)
    assert kept.lines == ["a", "b", "still there"]
    with pytest.raises(io.UnsupportedOperation):
        stream.read()


async def test_tasks_and_threads_of_a_trigger_print_under_its_name(stream: io.TextIOWrapper, kept: Kept) -> None:
    async def child() -> None:
        print("child", file=stream)

    async def trigger() -> None:
        await trio.to_thread.run_sync(lambda: print("thread", file=stream))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    async with trio.open_nursery() as nursery:
        with naming_trigger(ONE):
            nursery.start_soon(trigger)
    assert [(record["event"], record["trigger_id"]) for record in kept.records] == [("thread", 1), ("child", 1)]


PROGRAM = """
import multiprocessing, os, socket, sys
from headgate.child.logs import LogChannel, configure
from headgate.child.output import capture_output, end_lines
import logging

channel = LogChannel(socket.socket(fileno=int(sys.argv[1])))
configure(channel)
capture_output(channel)

def fork():
    print("printed by a fork")
    logging.getLogger("forked").warning("logged by a fork")
    print("error of a fork", file=sys.stderr)
    sys.stdout.flush()

print("from Python")
os.write(1, b"from C\\n")
process = multiprocessing.get_context("fork").Process(target=fork)
process.start()
process.join()
assert process.exitcode == 0
if (pid := os.fork()) == 0:
    print("before os._exit")
    os._exit(0)
os.waitpid(pid, 0)
for number in range(1000):
    print("line", number)
print("unfinished", end="")
end_lines()
channel.close()
os._exit(0)
"""


def test_a_process_whose_output_is_captured_loses_nothing_not_even_of_its_forks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        theirs.close()
        with ours.makefile("rb") as file:
            records = [json.loads(line) for line in file]
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.decode().splitlines() == ["from C", "printed by a fork", "before os._exit"]
    logged, error = err.decode().splitlines()
    assert json.loads(logged)["event"] == "logged by a fork"
    assert error == "error of a fork"
    assert [record["event"] for record in records] == [
        "from Python",
        *(f"line {number}" for number in range(1000)),
        "unfinished",
    ]


def test_a_secret_that_is_flushed_in_parts_is_hidden(kept: Kept) -> None:
    with secrets.apart():
        secrets.add("hunter2-and-more")
        stream = captured("stdout", 1, kept)
        for part in ("password hunt", "er2-and-", "more!\n"):
            stream.write(part)
            stream.flush()
        end_lines_of(stream)
    assert kept.whole_lines() == ["password ***!"]


def test_what_only_looks_like_the_beginning_of_a_secret_is_not_lost(kept: Kept) -> None:
    with secrets.apart():
        secrets.add("hunter2")
        stream = captured("stdout", 1, kept)
        for part in ("hunt", "ing\n", "h", "unte"):
            stream.write(part)
            stream.flush()
        end_lines_of(stream)
    assert kept.whole_lines() == ["hunting", "hunte"]
