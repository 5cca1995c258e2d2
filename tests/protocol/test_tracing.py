"""Ids of traces: pinned, because workers and whoever sends spans derive them apart, perhaps by different versions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from headgate.protocol.tracing import span_of_part, span_of_try, trace_of_run, traceparent

CREATED = datetime(2026, 1, 31, 12, 0, 0, 250_000, UTC)
TRACE = trace_of_run("etl", "r1", CREATED)


def test_the_ids_of_a_run_and_a_try_are_what_they_were() -> None:
    given = traceparent(TRACE, span_of_try(TRACE, "a", 3, 2))
    assert given == "00-841e01489e3916567561747087469996-57fb9a35a9c38dbf-01"
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", given)


def test_a_moment_is_the_same_in_every_zone() -> None:
    assert trace_of_run("etl", "r1", CREATED.astimezone()) == TRACE


def test_runs_and_tries_are_told_apart() -> None:
    others = {
        trace_of_run("etl", "r1", CREATED + timedelta(microseconds=1)),
        trace_of_run("etl", "r2", CREATED),
        trace_of_run("etl2", "r1", CREATED),
        trace_of_run("etl', 'r1", "", CREATED),
    }
    assert len(others | {TRACE}) == 5
    of_tries = {span_of_try(TRACE, *place) for place in (("a", -1, 1), ("a", -1, 2), ("a", 0, 1), ("b", -1, 1))}
    assert len(of_tries | {span_of_part(TRACE, "a", -1, 1), span_of_part(TRACE, "run")}) == 6


def test_names_of_all_characters_have_ids() -> None:
    assert 0 < trace_of_run("\udcff", "\x00", CREATED) < 2**128
