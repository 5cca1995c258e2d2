"""The encryption keys: made once, kept private, rotated, never shown."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from cryptography.fernet import Fernet

from headgate.store.db import secrets as secrets_module
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import KEY_FILE_BYTES_MAX, KEY_FILE_NAME, Secrets, fingerprint_of
from headgate.store.errors import BadKey, NoKeyFile, UnusableKey, WrongKeys
from headgate.store.store import Store


def new_key() -> str:
    return Fernet.generate_key().decode()


def test_the_first_use_makes_a_key_file_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "not" / "there"
    token = Secrets.open(home, None, makes_file=True).encrypt(b"x")
    assert os.listdir(home) == [KEY_FILE_NAME]
    assert (home / KEY_FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert Secrets.open(home, None).decrypt(token) == b"x"


def test_processes_that_make_the_file_at_the_same_time_use_one_key(tmp_path: Path) -> None:
    processes = 8
    start = Barrier(processes)

    def encrypt() -> str:
        start.wait()
        return Secrets.open(tmp_path, None, makes_file=True).encrypt(b"x")

    with ThreadPoolExecutor(processes) as pool:
        tokens = [future.result() for future in [pool.submit(encrypt) for _ in range(processes)]]
    assert os.listdir(tmp_path) == [KEY_FILE_NAME]
    assert [Secrets.open(tmp_path, None).decrypt(token) for token in tokens] == [b"x"] * processes


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    Secrets.open(tmp_path, None, makes_file=True)
    (tmp_path / KEY_FILE_NAME).chmod(mode)
    with pytest.raises(UnusableKey, match="chmod 600"):
        Secrets.open(tmp_path, None)


def test_the_first_key_encrypts_and_all_decrypt(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    before = Secrets.open(tmp_path, old).encrypt(b"x")
    rotated = Secrets.open(tmp_path, f" {new} , {old} ")
    assert rotated.decrypt(before) == b"x"
    assert Secrets.open(tmp_path, new).decrypt(rotated.encrypt(b"y")) == b"y"
    with pytest.raises(BadKey):
        Secrets.open(tmp_path, new).decrypt(before)


def test_the_environment_goes_before_the_file_and_makes_none(tmp_path: Path) -> None:
    Secrets.open(tmp_path, new_key())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("between", [",", ", ", "\n", "\r\n", " "])
def test_the_setting_has_keys_between_commas_or_in_lines_as_the_file_has(tmp_path: Path, between: str) -> None:
    first, second = new_key(), new_key()
    given = Secrets.open(tmp_path, f"{first}{between}{second}\n")
    assert given.fingerprints == [fingerprint_of(first), fingerprint_of(second)]


def test_a_key_file_holds_one_key_a_line(tmp_path: Path) -> None:
    old = Secrets.open(tmp_path, None, makes_file=True)
    token = old.encrypt(b"x")
    path = tmp_path / KEY_FILE_NAME
    path.write_text(f"{new_key()}\n\n{path.read_text()}")
    rotated = Secrets.open(tmp_path, None)
    assert rotated.decrypt(token) == b"x"
    assert rotated.fingerprints[1:] == old.fingerprints


def test_a_process_that_runs_finds_a_key_that_was_added_to_its_file(tmp_path: Path) -> None:
    running, adding = (Secrets.open(tmp_path, None, makes_file=True) for _ in range(2))
    (old,) = running.fingerprints
    new = adding.add_key()
    assert adding.fingerprints == [new, old]
    assert (tmp_path / KEY_FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert running.decrypt(adding.encrypt(b"x", new)) == b"x"
    assert Secrets.open(tmp_path, None).decrypt(running.encrypt(b"y", new)) == b"y"
    assert os.listdir(tmp_path) == [KEY_FILE_NAME]


def test_a_key_that_is_added_while_a_process_starts_is_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding, added = Secrets.open(tmp_path, None, makes_file=True), list[str]()
    read_key_file = secrets_module._read_key_file

    def read_before_it_is_added(path: Path) -> list[str]:
        keys = read_key_file(path)
        if not added:
            added.append("")  # what adds it reads the file as well
            added[0] = adding.add_key()
        return keys

    monkeypatch.setattr(secrets_module, "_read_key_file", read_before_it_is_added)
    starting = Secrets.open(tmp_path, None)
    assert starting.fingerprints == adding.fingerprints[1:]
    assert starting.decrypt(adding.encrypt(b"x", added[0])) == b"x"


@pytest.mark.parametrize("content", ["", "hunter2"])
def test_a_process_that_runs_keeps_its_keys_if_its_file_is_spoilt(tmp_path: Path, content: str) -> None:
    running = Secrets.open(tmp_path, None, makes_file=True)
    token = running.encrypt(b"x")
    (tmp_path / KEY_FILE_NAME).write_text(content)
    with pytest.raises(
        WrongKeys, match=r"key 0123; .*fernet.key has [0-9a-f]{16}; (there is no|key 1 of 1 in) .*: copy"
    ):
        running.encrypt(b"y", "0123")
    assert running.decrypt(token) == b"x"


def test_a_file_that_cannot_be_read_again_is_named_and_read_when_it_can(tmp_path: Path) -> None:
    running = Secrets.open(tmp_path, None, makes_file=True)
    other = Secrets.open(tmp_path, None)
    other.add_key()
    new = other.encrypt(b"new", other.fingerprints[0])
    path = tmp_path / "fernet.key"
    path.chmod(0o640)
    with pytest.raises(BadKey, match=r"the one key this supervisor has; the key file .* can be read by others"):
        running.decrypt(new)
    with pytest.raises(WrongKeys, match=r"fernet.key has \w+; the key file .* run chmod 600 on it: copy the key file"):
        running.encrypt(b"x", other.fingerprints[0])
    path.chmod(0o600)
    assert running.decrypt(new) == b"new", "its mode alone has changed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_key_file_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Secrets.open(tmp_path, None, makes_file=True)
    path = tmp_path / "fernet.key"
    os.chown(path, 1, 2)
    keys.add_key()
    assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (1, 2, 0o600)
    before = path.read_bytes()

    def refused(path: Path, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refused)
    with pytest.raises(UnusableKey, match=r"belongs to the user \w+: change it as that user"):
        keys.add_key()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["fernet.key"]


def test_without_a_key_file_none_is_made_by_the_way(tmp_path: Path) -> None:
    with pytest.raises(NoKeyFile, match=f"there is no key file {tmp_path}/fernet.key: run `headgate db upgrade`"):
        Secrets.open(tmp_path, None)
    assert os.listdir(tmp_path) == []


def test_a_fingerprint_says_nothing_of_its_key_and_is_the_same_everywhere() -> None:
    key = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    assert fingerprint_of(key) == fingerprint_of(key.encode()) == "f2f250e1d46b7a98"
    assert fingerprint_of(new_key()) != fingerprint_of(new_key())


@pytest.mark.parametrize("bad", ["hunter2", "é" * 44, "A" * 44 + "!", "A" * 43])
def test_a_malformed_key_is_refused_and_not_shown(tmp_path: Path, bad: str) -> None:
    with pytest.raises(UnusableKey, match="key 2 of 2") as told:
        Secrets.open(tmp_path, f"{new_key()},{bad}")
    assert bad not in str(told.value)
    assert told.value.__suppress_context__


@pytest.mark.parametrize("blank", ["", " , ,"])
def test_a_setting_without_a_key_is_an_error_and_not_another_key(tmp_path: Path, blank: str) -> None:
    with pytest.raises(UnusableKey, match="no encryption key"):
        Secrets.open(tmp_path, blank)
    assert os.listdir(tmp_path) == []


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE_NAME
    path.touch(0o600)
    with pytest.raises(UnusableKey, match="no encryption key"):
        Secrets.open(tmp_path, None)
    path.write_bytes(b"A" * (KEY_FILE_BYTES_MAX + 1))
    with pytest.raises(UnusableKey, match="no key file"):
        Secrets.open(tmp_path, None)
    path.unlink()
    path.mkdir()
    with pytest.raises(UnusableKey, match="cannot be used"):
        Secrets.open(tmp_path, None)


def test_no_key_is_shown_by_repr(tmp_path: Path) -> None:
    key = new_key()
    assert key not in repr(Secrets.open(tmp_path, key))


def test_what_was_tampered_with_is_not_decrypted(secrets: Secrets) -> None:
    token = secrets.encrypt(b"x")
    flipped = token[:-10] + ("A" if token[-10] != "A" else "B") + token[-9:]
    with pytest.raises(BadKey):
        secrets.decrypt(flipped)
    with pytest.raises(BadKey):
        secrets.decrypt("é")


def test_a_trigger_that_no_key_decrypts_is_claimed_with_the_reason_and_alone(store: Store, database_url: str) -> None:
    with Store(open_engine(database_url), secrets=Secrets([new_key()], source="another")) as other:
        other.add_watcher("theirs", "a.B", {})
    store.add_watcher("ours", "a.B", {"x": 1})
    epoch = store.register_triggerer(
        hostname="h", pid=1, machine="m", process_started=0.0, capacity=10, queues=("default",)
    )
    theirs, ours = store.claim_triggers(epoch, limit=10, queues=("default",))
    assert theirs.kwargs is None
    assert "cannot be decrypted" in theirs.error
    assert ours.kwargs is not None
    assert ours.error == ""
