"""``headgate keys``, and commands on a machine whose keys are not those of the database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from tests.store.harness import register

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets, fingerprint_of
from headgate.store.store import Store


def new_key() -> str:
    return Fernet.generate_key().decode()


def keys_of(called: Any) -> dict[str, tuple[str, bool]]:
    assert (called.code, called.err) == (0, "")
    return {row["fingerprint"]: (row["state"], row["here"]) for row in called.rows()}


def test_an_upgrade_makes_the_key_file_and_a_read_makes_none(call: Any, home: Path) -> None:
    assert call("db", "upgrade").code == 0
    key = (home / "fernet.key").read_text().strip()
    (home / "fernet.key").rename(home / "away")

    called = call("variables", "get", "a")

    assert called.code == 2
    assert called.err == (
        f"headgate: this database is written with the key {fingerprint_of(key)}; there is no key file "
        f"{home}/fernet.key: copy the key file of the machine that made it, or set HEADGATE_FERNET_KEYS\n"
    )
    assert not (home / "fernet.key").exists()
    assert keys_of(call("keys", "list", "--json")) == {fingerprint_of(key): ("primary", False)}


@pytest.mark.parametrize("command", [("variables", "set", "c", "d"), ("triggerer",), ("up",), ("db", "upgrade")])
def test_every_command_with_another_key_is_refused(
    call: Any, home: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    call("db", "upgrade")
    monkeypatch.setenv("HEADGATE_FERNET_KEYS", new_key())

    called = call(*command)

    assert called.code == 2
    assert "headgate: this database is written with the key " in called.err
    assert len(called.err.splitlines()) == 1


def test_a_database_that_a_machine_without_keys_reads_first_gets_none(call: Any, database_url: str, home: Path) -> None:
    called = call("--db", database_url, "variables", "list")

    assert called.code == 2
    assert called.err == f"headgate: there is no key file {home}/fernet.key: run `headgate db upgrade` to make it\n"
    assert not home.exists()


def test_keys_are_rotated_and_listed(call_database: Any, home: Path) -> None:
    call_database("variables", "set", "v", "value")
    call_database("connections", "set", "c", "http://u:p@h")
    (old,) = keys_of(call_database("keys", "list", "--json"))

    called = call_database("keys", "rotate")

    new = fingerprint_of((home / "fernet.key").read_text().splitlines()[0])
    assert (called.code, called.err) == (0, "")
    assert called.out.splitlines() == [
        f"the key {new} is the primary one; 2 values are encrypted again",
        f"retired: {old}. Nothing needs it any more, except backups that are older than this",
    ]
    assert keys_of(call_database("keys", "list", "--json")) == {new: ("primary", True), old: ("retired", True)}
    assert call_database("variables", "get", "v").out == "value\n"
    assert "primary" in call_database("keys", "list").out


def test_a_new_key_is_not_made_by_the_way_if_supervisors_run_on_other_machines(
    call_database: Any, database_url: str, home: Path
) -> None:
    call_database("variables", "list")
    (old,) = keys_of(call_database("keys", "list", "--json"))
    with Store(open_engine(database_url), secrets=Secrets.open(home, None)) as store:
        register(store, hostname="far.example", machine="another")

    refused = call_database("keys", "rotate")

    assert refused.code == 1
    assert "a supervisor runs on far.example: run `headgate keys add`, copy the key file" in refused.err
    assert call_database("keys", "add").code == 0
    new = fingerprint_of((home / "fernet.key").read_text().splitlines()[0])
    assert keys_of(call_database("keys", "list", "--json")) == {old: ("primary", True), new: ("unused", True)}
    assert call_database("keys", "rotate").code == 0
    assert keys_of(call_database("keys", "list", "--json")) == {new: ("primary", True), old: ("retired", True)}


def test_a_value_that_no_key_decrypts_is_counted(call_database: Any, query: Any) -> None:
    call_database("variables", "set", "v", "value")
    query("UPDATE variable SET value = 'lost'")

    called = call_database("keys", "rotate")

    assert called.code == 0
    assert "1 values cannot be decrypted with any of the keys, and stay as they are" in called.out
