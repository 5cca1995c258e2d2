"""A round too long for one frame: its pieces fit, say together what it said, and never turn it around."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.protocol import split_round, split_sync
from headgate.protocol.errors import FrameTooLong
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    CancelTrigger,
    FinishedTrigger,
    FiredEvent,
    Refusal,
    RefusedEvent,
    RunnerFigures,
    StateChanges,
    StateSync,
    StreamFigures,
    TriggerSpec,
)

INTS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=20)
BYTES = st.binary(max_size=60)
KEYS = st.none() | TEXT

EVENTS = st.builds(
    FiredEvent, INTS, TEXT, INTS, INTS, BYTES, KEYS, INTS, st.sampled_from(["event", "skipped"]), st.booleans()
)
REFUSED = st.builds(RefusedEvent, INTS, TEXT, INTS, INTS, TEXT, INTS, BYTES, KEYS, INTS)
FINISHED = st.builds(FinishedTrigger, INTS, TEXT, st.just("failed"), INTS, TEXT, TEXT, st.none())
ROUNDS = st.builds(
    StateChanges,
    INTS,
    st.lists(EVENTS, max_size=40).map(tuple),
    st.lists(REFUSED, max_size=5).map(tuple),
    st.lists(FINISHED, max_size=5).map(tuple),
    st.lists(INTS, max_size=40).map(tuple),
    st.booleans(),
)
SYNCS = st.builds(
    StateSync,
    INTS,
    st.lists(INTS, max_size=40).map(tuple),
    st.lists(st.builds(Refusal, INTS, INTS, TEXT, st.booleans()), max_size=5).map(tuple),
    st.lists(st.builds(TriggerSpec, INTS, TEXT, TEXT, TEXT, BYTES), max_size=20).map(tuple),
    st.lists(st.builds(CancelTrigger, INTS, st.just("timeout")), max_size=20).map(tuple),
    st.booleans(),
    st.none() | st.floats(0, 60),
    st.booleans(),
)
# Any one element of the strategies above fits with its envelope: 6 ints, 3 texts of 80 bytes, 60 bytes.
LIMITS = st.integers(500, 5000)

WIDEST = FiredEvent(2**64 - 1, "\U0001f6a6", 2**64 - 1, 2**64 - 1, b"", "\U0001f6a6", 2**64 - 1, "success", True)


def joined(pieces: list[Any], *names: str) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(element for piece in pieces for element in getattr(piece, name)) for name in names)


def check_pieces(whole: Any, pieces: list[Any], limit: int) -> None:
    assert all(len(encode_message(piece)) <= limit for piece in pieces)
    assert {piece.round for piece in pieces} == {whole.round}
    assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [whole.more]
    if len(encode_message(whole)) > limit:
        assert len(pieces) > 1


@settings(deadline=None)
@given(changes=ROUNDS, limit=LIMITS)
@example(changes=StateChanges(2**64 - 1, events=(WIDEST,) * 14), limit=700)
def test_the_pieces_of_a_round_fit_and_say_what_it_said(changes: StateChanges, limit: int) -> None:
    pieces = split_round(changes, limit)
    check_pieces(changes, pieces, limit)
    names = ("events", "refused", "finished", "stuck")
    assert joined(pieces, *names) == tuple(getattr(changes, name) for name in names)


def test_wide_text_and_wide_seqs_do_not_slip_over_the_limit() -> None:
    """The size is only estimated at first: the estimate must hold for what takes the most bytes."""
    wide = FiredEvent(1, "\U0001f6a6" * 200, 0, 0, b"", "\U0001f6a6" * 200)
    for event in (wide, FiredEvent(1, "", 0, 0, b"", wide.key), FiredEvent(1, wide.trigger_run_id, 0, 0, b"")):
        changes = StateChanges(1, events=(event,) * 10)
        limit = len(encode_message(changes)) - 1
        check_pieces(changes, split_round(changes, limit), limit)
    sync = StateSync(1, persisted=(2**64 - 1,) * 1000, lease_s=15.5)
    for limit in range(900, 1000):
        check_pieces(sync, split_sync(sync, limit), limit)


@settings(deadline=None)
@given(changes=ROUNDS, limit=LIMITS)
def test_no_end_of_a_trigger_comes_before_an_event(changes: StateChanges, limit: int) -> None:
    ended = False
    for piece in split_round(changes, limit):
        assert not (ended and (piece.events or piece.refused))
        ended = ended or bool(piece.finished)


@settings(deadline=None)
@given(sync=SYNCS, limit=LIMITS)
def test_the_pieces_of_a_sync_fit_and_say_what_it_said(sync: StateSync, limit: int) -> None:
    pieces = split_sync(sync, limit)
    check_pieces(sync, pieces, limit)
    names = ("persisted", "refused", "to_create", "to_cancel")
    assert joined(pieces, *names) == tuple(getattr(sync, name) for name in names)
    created = False
    for piece in pieces:
        assert not (created and (piece.persisted or piece.refused or piece.to_cancel))
        created = created or bool(piece.to_create)


@settings(deadline=None)
@given(event=EVENTS, count=st.integers(2, 20))
def test_a_round_that_fits_is_never_cut(event: FiredEvent, count: int) -> None:
    changes = StateChanges(1, events=(event,) * count)
    assert split_round(changes, len(encode_message(changes))) == [changes]
    assert len(split_round(changes, len(encode_message(changes)) - 1)) == 2


def test_a_small_round_is_handed_through_unchanged() -> None:
    changes = StateChanges(1, events=(FiredEvent(1, "run", 0, 1, b"1"),))
    sync = StateSync(1, persisted=(1,))
    assert split_round(changes, 1000)[0] is changes
    assert split_sync(sync, 1000)[0] is sync


def test_figures_go_with_the_last_piece_and_are_left_out_where_they_do_not_fit() -> None:
    figures = RunnerFigures((StreamFigures("d", "n" * 200),), 1)
    event = FiredEvent(1, "run", 0, 1, bytes(100))
    small = StateChanges(1, events=(event,), figures=figures)
    assert split_round(small, 1000) == [small]
    first, last = split_round(StateChanges(1, events=(event,) * 10, figures=figures, more=True), 1200)
    assert (first.figures, last.figures, last.more) == (None, figures, True)
    [without] = split_round(small, 300)
    assert without == StateChanges(1, events=(event,))


@pytest.mark.parametrize("elements", [15, 16, 17, 65_535, 65_536, 70_000])
def test_pieces_fit_where_the_header_of_a_list_grows(elements: int) -> None:
    changes = StateChanges(1, stuck=(1,) * elements)
    exact = len(encode_message(changes))
    assert len(split_round(changes, exact)) == 1
    pieces = split_round(changes, exact - 1)
    assert len(pieces) == 2
    check_pieces(changes, pieces, exact - 1)


def test_many_triggers_to_create_are_cut_into_full_frames() -> None:
    specs = tuple(TriggerSpec(number, "run", "name", "a.B", bytes(1000)) for number in range(1000))
    pieces = split_sync(StateSync(to_create=specs), 100_000)
    check_pieces(StateSync(to_create=specs), pieces, 100_000)
    assert len(pieces) == 11


def test_every_piece_says_that_the_lease_is_lost() -> None:
    """I10: the first one has to be enough, whatever becomes of the rest."""
    sync = StateSync(to_cancel=tuple(CancelTrigger(number, "reassigned") for number in range(1000)), lease_lost=True)
    pieces = split_sync(sync, 1000)
    assert len(pieces) > 10
    assert all(piece.lease_lost for piece in pieces)


def test_an_element_that_fits_no_frame_is_named() -> None:
    good, bad = FiredEvent(1, "run", 0, 1, b"1"), FiredEvent(1, "run", 1, 2, bytes(1000))
    with pytest.raises(FrameTooLong, match="StateChanges with one element of events needs a frame of 1,0"):
        split_round(StateChanges(1, events=(good, bad)), 1000)
    with pytest.raises(FrameTooLong, match="StateSync with one element of to_create"):
        split_sync(StateSync(to_create=(TriggerSpec(1, "run", "n", "a.B", bytes(1000)),)), 1000)
