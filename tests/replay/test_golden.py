"""Logs of real pairs, captured once: every later headgate says and stores what that one said and stored.

They are made by ``capture.py`` in this folder. One that stops to replay means that the wire, or what the supervisor
answers, has changed: make them anew only if that was meant, and say so in the changelog.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.protocol.framelog.log import Record, read_frames, verify
from headgate.protocol.messages.runner import StateSync, Welcome
from headgate.supervisor.replay.run import open_replay_store, replay

CAPTURED = Path(__file__).parent / "captured"
BYTES_MAX = 200_000  # of one capture: what stands in the repository stays there

# Supervisors and runners of each, so that a capture made anew still shows what it is here to show.
GOLDEN = {
    "plain": (1, 1),
    "runner-killed": (1, 4),
    "supervisor-killed": (3, 3),
    "both-and-drain": (3, 4),
    "users-act": (2, 3),
}
# What users did in the captures, as often as `capture.py` did it.
ACTS = {"users-act": {"changed": 2, "paused": 2, "released": 2, "removed": 1, "restarted": 1}}


def files_of(name: str) -> list[Path]:
    return sorted((CAPTURED / name).glob("*.hgframe"))


def test_every_capture_is_replayed() -> None:
    assert {path.name for path in CAPTURED.iterdir() if path.is_dir()} == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_capture_replays_clean(name: str) -> None:
    with open_replay_store(None) as store:
        result = replay(files_of(name), store)
    assert result.is_clean, result.difference
    assert (result.supervisors, result.runners) == GOLDEN[name]
    assert result.acts == ACTS.get(name, {})
    assert result.frames > 200
    assert result.rows >= 300


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_capture_verifies_and_is_small(name: str) -> None:
    for path in files_of(name):
        assert verify(path).ok
    assert sum(path.stat().st_size for path in files_of(name)) <= BYTES_MAX


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_capture_holds_no_kwargs_and_no_path(name: str) -> None:
    for path in files_of(name):
        for record in read_frames(path):
            assert isinstance(record, Record)
            match record.message():
                case StateSync(to_create=specs):
                    assert all(spec.kwargs.startswith(b'"masked: ') for spec in specs)
                case Welcome(settings=settings):
                    assert settings.import_paths == ()
                case _:
                    pass


def test_the_handmade_conversation_replays_clean() -> None:
    with open_replay_store(None) as store:
        result = replay([CAPTURED / "conversation-v3.hgframe"], store)
    assert result.is_clean, result.difference
    assert (result.frames, result.rows) == (8, 1)
