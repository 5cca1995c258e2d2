"""``headgate frames replay``: what it prints, and how it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.cli.main import main
from headgate.protocol.framelog.log import Record, encode_record, read_frames
from headgate.supervisor.logs import process_log

CAPTURED = Path(__file__).parent / "captured"
CONVERSATION = CAPTURED / "conversation-v3.hgframe"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of the test's own, and a database in its settings that no replay may touch."""
    monkeypatch.setenv("HEADGATE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADGATE_DATABASE_URL", f"sqlite:///{tmp_path}/production.db")
    yield
    process_log.reset()
    assert not (tmp_path / "production.db").exists()


def test_a_clean_replay_is_one_line_and_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frames", "replay", str(CAPTURED / "both-and-drain")]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert "replayed clean: 356 frames of 3 supervisors and 4 runners" in line
    assert line.endswith("480 rows, 0 redelivered, 0 dead letters")
    assert err == "", "what a core has to say was news when the log was made"


def test_a_clean_replay_counts_the_acts_of_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frames", "replay", str(CAPTURED / "users-act")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    kinds = "2 changed, 2 paused, 2 released, 1 removed, 1 restarted"
    assert line.endswith(f"8 acts of users or other supervisors taken from the log: {kinds}")


def test_a_difference_shows_both_frames_and_leaves_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = tmp_path / "changed.hgframe"
    data = CONVERSATION.read_bytes()[:16]
    for number, record in enumerate(read_frames(CONVERSATION), 1):
        assert isinstance(record, Record)
        body = record.body.replace(b"\x91\x01", b"\x91\x02") if number == 5 else record.body
        data += encode_record(record.time, record.direction, record.incarnation, body)
    changed.write_bytes(data)
    assert main(["frames", "replay", str(changed)]) == 1
    first, place, recorded, replayed = capsys.readouterr().out.splitlines()
    assert first == f"{changed}: frame 5 of 8 differs: persisted[0] is 2, replayed 1"
    assert place.startswith(f"  in {changed} at offset ")
    assert recorded.startswith("  recorded  2025-06-15")
    assert "persisted=1[2]" in recorded
    assert "persisted=1[1]" in replayed
    assert main(["frames", "replay", str(changed), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_clean"] is False
    assert found["difference"]["frame"] == 5


def test_a_flipped_byte_leaves_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flipped = bytearray(CONVERSATION.read_bytes())
    flipped[200] ^= 1
    (tmp_path / "flipped.hgframe").write_bytes(flipped)
    assert main(["frames", "replay", str(tmp_path / "flipped.hgframe")]) == 1
    assert "the CRC of the record" in capsys.readouterr().out


def test_until_keeps_a_database_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/kept.db"
    assert main(["frames", "replay", str(CONVERSATION), "--until", "5", "--db", url]) == 0
    assert "replayed clean: 5 frames of 1 supervisor and 1 runner in" in capsys.readouterr().out
    assert main(["--db", url, "events", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["payload"] == {"order": 17}
    assert main(["frames", "replay", str(CONVERSATION), "--db", url]) == 1
    assert "is not empty: a replay needs one of its own" in capsys.readouterr().err


def test_what_is_no_frame_log_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.hgframe").write_text("hello")
    assert main(["frames", "replay", str(tmp_path / "x.hgframe")]) == 1
    assert capsys.readouterr().err == f"headgate: {tmp_path}/x.hgframe is not a frame log\n"
