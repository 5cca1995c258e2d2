"""A log that was changed, in a field or in any byte, does not replay clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.replay.live import Live
from tests.supervisor.replay.replay_harness import (
    FILE_HEADER_BYTES,
    a_bit_of_everything,
    change_first,
    edited,
    fired,
    problem,
    replayed,
    with_field,
)

from headgate.protocol.errors import FrameLogError
from headgate.protocol.link.runner_dialect import Message
from headgate.protocol.messages.queries import (
    Response,
)
from headgate.protocol.messages.runner import (
    Hello,
    StateChanges,
    StateSync,
)

EDITS: dict[str, tuple[Callable[[int, Message], Any], str]] = {
    "a confirmation changed": (
        change_first(StateSync, lambda m: with_field(persisted=(9, *m.persisted[1:]))(m), having="persisted"),
        r"persisted\[0\] is 9, replayed 1",
    ),
    "a confirmation taken out": (
        change_first(StateSync, lambda m: with_field(persisted=m.persisted[:-1])(m), having="persisted"),
        "persisted has 4 elements, replayed 5",
    ),
    "an answer taken out": (change_first(StateSync, lambda m: None, having="persisted"), "round is 2, replayed 1"),
    "a round taken out": (change_first(StateChanges, lambda m: None), "the replay says nothing"),
    "a start taken out": (change_first(StateSync, lambda m: None, having="to_create"), "."),
    "a trigger renamed": (
        change_first(
            StateSync,
            lambda m: with_field(to_create=(with_field(name="x")(m.to_create[0]), *m.to_create[1:]))(m),
            having="to_create",
        ),
        "name is 'one', replayed 'x'",  # where it is started again: no user can rename it
    ),
    "an answer to a query changed": (
        change_first(Response, lambda m: with_field(result=with_field(payload=b"0")(m.result))(m), having="result"),
        r"result.payload is b'0', replayed b'\{",
    ),
    "an answer to a query made up": (
        change_first(
            Response, lambda m: with_field(result=with_field(sequence_index=77)(m.result))(m), having="result"
        ),
        r"result.sequence_index is 77, replayed 2",
    ),
    "an answer to no query": (change_first(Response, with_field(id=77)), "query 77, which was not asked"),
    "a refusal taken out": (
        change_first(StateSync, with_field(refused=()), having="refused"),
        "refused has 0 elements, replayed 1",
    ),
    "a cancel for another reason": (
        change_first(
            StateSync,
            lambda m: with_field(to_cancel=(with_field(reason="shutdown")(m.to_cancel[0]),))(m),
            having="to_cancel",
        ),
        r"to_cancel\[0\].reason is 'shutdown', replayed 'user'",
    ),
    "another event": (
        change_first(StateChanges, lambda m: with_field(events=m.events[1:])(m), having="events"),
        r"persisted\[0\] is 1, replayed 2",
    ),
    "an unknown trigger": (
        change_first(
            StateChanges,
            lambda m: with_field(events=(with_field(trigger_id=99)(m.events[0]), *m.events[1:]))(m),
            having="events",
        ),
        "persisted",
    ),
    "a second Hello": (change_first(StateChanges, lambda m: Hello(1, 1, 1, "")), "the conversation went on"),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_log_that_was_edited_with_its_crc_put_right_differs(live: Live, tmp_path: Path, what: str) -> None:
    a_bit_of_everything(live)
    edit, expected = EDITS[what]
    # Each edit is used once, and remembers that.
    found = problem([edited(live.files()[0], tmp_path, edit), *live.files()[1:]])
    assert re.search(expected, found), found


def test_a_difference_shows_both_frames(live: Live, tmp_path: Path) -> None:
    a_bit_of_everything(live)
    edit = change_first(StateSync, lambda m: with_field(persisted=(9, *m.persisted[1:]))(m), having="persisted")
    difference = replayed([edited(live.files()[0], tmp_path, edit)]).difference
    assert difference is not None
    assert difference.frame == 7
    assert difference.recorded is not None
    assert "persisted=5[9, 2, 1" in difference.recorded
    assert difference.replayed is not None
    assert "persisted=5[1, 2, 1" in difference.replayed


def test_no_byte_of_a_log_can_be_changed_unnoticed(live: Live, tmp_path: Path) -> None:
    live.store.add_watcher("one", "users.One", {})
    live.start_runner()
    live.round(fired(live.specs()["one"], 0))
    whole = live.files()[0].read_bytes()
    copy = tmp_path / "flipped.hgframe"
    for position in range(len(whole)):
        copy.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            assert not replayed_cheaply(copy), f"byte {position}"
        except FrameLogError:
            assert position < FILE_HEADER_BYTES


def replayed_cheaply(path: Path) -> bool:
    """Whether a log replays clean, on a database in memory: a thousand of them are made here."""
    from headgate.supervisor.replay import log as replay_log

    passed = replay_log.SkippedFrames()
    if any(isinstance(item, replay_log.Unreadable) for item in replay_log.read_log([path], passed)):
        return False
    return replayed([path]).is_clean and not passed.torn
