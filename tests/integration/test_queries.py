"""What a trigger is told by a real supervisor, and that it stays out of everything that is written (I12)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from tests.integration.conftest import StartPair
from tests.waiting import wait_until

from headgate.protocol.framelog.log import read_frames
from headgate.protocol.values import decode_value
from headgate.store.store import Store

TOKEN = "tok-ünseen/0123456789"
PASSWORD = "hunter/22"
CONFIG = '{"user": "operator-name", "limit": 5}'
URI = f"pg://me:{quote(PASSWORD, safe='')}@db.example/x"


def test_a_trigger_reads_what_users_stored_and_no_secret_is_written(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    users_store.tasks.variables.put("token", b"the environment comes first")
    users_store.tasks.variables.put("config", CONFIG.encode())
    users_store.tasks.connections.put("db", URI.encode())
    users_store.add_watcher("indiscreet", "users_triggers.Indiscreet", {"marker": str(tmp_path / "marker")})
    capture = tmp_path / "frames"
    pair = start_pair("--capture", str(capture), var_token=TOKEN, retry_wait_s="0.01")
    logged = pair.wait_log("my token is", trigger_name="indiscreet")
    assert logged["event"] == "my token is ***"
    assert logged["config"] == {"user": "***", "limit": 5}
    assert logged["connection"] == [
        "Connection(name='db', scheme='pg', host='db.example', port=None, schema='x', hosts=(('db.example', None),))",
        "***",
    ]
    assert logged["raw"] == "b'***'"
    assert pair.wait_log("the password is")["event"] == "the password is ***"
    wait_until(lambda: len(list(users_store.inspect.events())) >= 2, "two runs of the trigger")
    assert pair.stop() == 0
    pair.close()
    lines = [str(record) for record in pair.records]
    while not pair._incoming.empty():
        lines.append(str(pair._incoming.get()))
    everything = "\n".join(lines)
    assert "printed *** ***" in everything
    assert "written *** ***" in everything
    payloads = [decode_value(row.payload) for row in users_store.inspect.events()]
    assert payloads == [[len(TOKEN), "operator-name", "db.example", None]] * 2
    (row,) = users_store.inspect.triggers()
    assert row.last_error is not None
    assert row.last_error.startswith("ValueError: *** does not take ***\n\nTraceback")
    frames = b"".join(path.read_bytes() for path in capture.iterdir())
    assert sum(1 for path in capture.iterdir() for _ in read_frames(path)) > 5
    everything += row.last_error
    for secret in (TOKEN, PASSWORD, quote(PASSWORD, safe=""), URI):
        assert secret not in everything
        assert repr(secret.encode())[2:-1] not in everything
        assert secret.encode() not in frames
    # An event is the author's own: it is stored as it is, and what is in it is in the capture.
    assert b"operator-name" in frames
