"""The log of the supervisor: what is written, in which form, and that it never stops the work."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from headgate.supervisor.config import Settings
from headgate.supervisor.logs import process_log


@pytest.fixture(autouse=True)
def _unconfigured_afterwards() -> Iterator[None]:
    yield
    process_log.reset()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def configured(
    stream: io.StringIO | None = None,
    log_format: Literal["auto", "human", "json"] = "auto",
    log_level: Literal["debug", "info", "warning"] = "info",
) -> io.StringIO:
    stream = stream or io.StringIO()
    process_log.configure(Settings(home=Path("/h"), log_format=log_format, log_level=log_level), stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_elsewhere_than_on_a_terminal_a_record_is_one_json_line() -> None:
    stream = configured()

    structlog.get_logger("headgate.x").warning("runner died", signal="SIGKILL", lines=["a", "b"])

    (record,) = lines(stream)
    assert list(record)[:4] == ["timestamp", "level", "event", "logger"]
    assert record["timestamp"].endswith("Z")
    assert record | {"timestamp": ""} == {
        "timestamp": "",
        "level": "warning",
        "event": "runner died",
        "logger": "headgate.x",
        "signal": "SIGKILL",
        "lines": ["a", "b"],
    }


def test_on_a_terminal_a_record_is_for_people() -> None:
    stream = configured(Terminal())

    structlog.get_logger("headgate.x").info("runner started", pid=7)

    assert "runner started" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        lines(stream)


def test_a_form_that_was_asked_for_wins_over_the_terminal() -> None:
    stream = configured(Terminal(), log_format="json")

    structlog.get_logger().info("a")

    assert lines(stream)[0]["event"] == "a"


def test_records_below_the_level_are_not_written() -> None:
    stream = configured(log_level="warning")

    structlog.get_logger().info("a")
    process_log.relay({"event": "b", "level": "info"})
    structlog.get_logger().warning("c")
    process_log.relay({"event": "d", "level": "error"})

    assert [record["event"] for record in lines(stream)] == ["c", "d"]


def test_a_logger_made_before_the_configuration_obeys_it() -> None:
    logger = structlog.get_logger("early")
    first = configured()
    logger.info("a")
    second = configured()
    logger.info("b")

    assert [record["event"] for record in lines(first)] == ["a"]
    assert [record["event"] for record in lines(second)] == ["b"]


def test_an_exception_is_written_without_the_values_of_variables() -> None:
    for log_format in ("json", "human"):
        stream = configured(log_format=log_format)
        kwargs = "hunter" + str(2)
        try:
            raise KeyError(len(kwargs))
        except KeyError:
            structlog.get_logger().exception("it broke")

        assert "KeyError" in stream.getvalue()
        assert "hunter2" not in stream.getvalue()


def test_libraries_are_heard_from_warnings_on_even_at_debug() -> None:
    stream = configured(log_level="debug")

    logging.getLogger("sqlalchemy.engine").info("INSERT ... secret")
    logging.getLogger("library").warning("watch %s", "out")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    watched, warned = lines(stream)
    assert (watched["event"], watched["level"], watched["logger"]) == ("watch out", "warning", "library")
    assert "DeprecationWarning: old" in warned["event"]


def test_a_relayed_record_loses_no_field() -> None:
    stream = configured()
    record = {
        "event": "fetched",
        "level": "info",
        "timestamp": "2026-01-02T03:04:05Z",
        "logger": "my.triggers",
        "trigger_id": 7,
        "trigger_name": "orders",
        "exception": "Traceback ...",
        "nested": {"a": [1, None]},
    }

    process_log.relay(record)

    assert lines(stream) == [record]


@pytest.mark.parametrize("log_format", ["json", "human"])
@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": 3, "level": None},
        {"event": "x", "level": "trace", "exc_info": "text", "exception": 4, "stack": ["a"]},
        {"event": "x", "exc_info": True, "stack_info": True, "timestamp": 5, "logger": None},
        {"event": "\udcff", "value": "\udcff", 3: {(1, 2): object()}},
    ],
)
def test_a_relayed_record_may_hold_anything(log_format: Literal["json", "human"], record: dict[Any, Any]) -> None:
    stream = configured(log_format=log_format)

    process_log.relay(record)

    assert stream.getvalue().endswith("\n")
    assert str(record.get("event", "")) in (lines(stream)[0]["event"] if log_format == "json" else stream.getvalue())


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_a_record_of_ours_may_hold_anything_too(log_format: Literal["json", "human"]) -> None:
    stream = configured(log_format=log_format)
    huge = 10**5_000

    structlog.get_logger("headgate.x").warning("read", number=huge, within=[huge], other=Unshown(), lag=7)
    process_log.relay({"event": "read", "level": "info", "number": huge})

    ours, relayed = lines(stream)
    assert (ours["event"], ours["level"], ours["number"], ours["lag"]) == ("read", "warning", hex(huge), "7")
    assert ours["within"].startswith("<list that cannot be shown: Exceeds the limit")
    assert ours["other"] == "<Unshown that cannot be shown: not now>"
    assert ("render_error" in ours) == (log_format == "human")
    assert relayed["number"] == hex(huge)


def test_a_log_nobody_reads_stops_nothing() -> None:
    configured(Gone())

    structlog.get_logger().error("a")
    process_log.relay({"event": "b"})
    logging.getLogger("library").error("c")


def test_relaying_before_the_configuration_writes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    process_log.relay({"event": "early", "level": "error"})

    written = capsys.readouterr()
    assert "early" in written.err
    assert written.out == ""
