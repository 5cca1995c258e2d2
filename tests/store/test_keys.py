"""The keys of a database: one machine's at the first start, refused elsewhere, rotated while others write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import Engine
from tests.store.harness import Query, add, register, wait_until_blocked
from tests.supervisor.tasks_harness import WAIT, Tasks
from tests.waiting import WITHIN_S

from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import KEY_FILE_NAME, Secrets, fingerprint_of
from headgate.store.errors import UnusableKey, WrongKeys
from headgate.store.keys import ENCRYPTED, KeyLine, known_keys, open_secrets
from headgate.store.store import Store


def new_key() -> str:
    return Fernet.generate_key().decode()


@pytest.fixture
def engine(database_url: str) -> Engine:
    return open_engine(database_url)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def opened(engine: Engine, home: Path, keys: str | None = None) -> Store:
    """A store as a process on the machine with this home opens it."""
    return Store(engine, secrets=open_secrets(engine, home, keys, makes_file=True))


def states(engine: Engine) -> dict[str, str]:
    def state(key: KeyLine) -> str:
        if key.superseded_at is None:
            return "primary"
        return "superseded" if key.retired_at is None else "retired"

    return {key.fingerprint: state(key) for key in known_keys(engine)}


def rotate_batches(store: Store, *, rows_max: int = 2) -> int:
    """Do the second step of a rotation; return how many values were rewritten."""
    rewritten = 0
    for column in ENCRYPTED:
        next_id: int | None = 0
        while next_id is not None:
            batch = store.keys.encrypt_again(column, next_id, rows_max=rows_max)
            assert (batch.left, batch.unreadable) == (0, 0)
            rewritten += batch.rewritten
            next_id = batch.next_id
    return rewritten


# --- starts --------------------------------------------------------------------------------------


def test_the_first_start_makes_a_key_and_writes_its_fingerprint_down(engine: Engine, home: Path) -> None:
    secrets = open_secrets(engine, home, None, makes_file=True)
    assert states(engine) == {fingerprint_of((home / KEY_FILE_NAME).read_text().strip()): "primary"}
    assert open_secrets(engine, home, None, makes_file=False).fingerprints == secrets.fingerprints


def test_a_machine_with_another_key_is_refused_with_both_fingerprints(engine: Engine, home: Path) -> None:
    ours, theirs = new_key(), new_key()
    open_secrets(engine, home, ours, makes_file=True)
    with pytest.raises(WrongKeys) as told:
        open_secrets(engine, home, theirs, makes_file=True)
    assert str(told.value) == (
        f"this database is written with the key {fingerprint_of(ours)}; the setting fernet_keys has "
        f"{fingerprint_of(theirs)}: copy the key file of the machine that made it, or set HEADGATE_FERNET_KEYS"
    )


def test_a_machine_without_a_key_file_is_refused_and_none_is_made(engine: Engine, home: Path) -> None:
    key = new_key()
    open_secrets(engine, home, key, makes_file=True)
    with pytest.raises(WrongKeys, match=f"{fingerprint_of(key)}; there is no key file .*home/fernet.key: copy the key"):
        open_secrets(engine, home, None, makes_file=True)
    assert not home.exists()


def test_of_first_starts_at_the_same_time_one_key_wins_and_the_others_make_none(
    database_url: str, tmp_path: Path
) -> None:
    machines = 4
    start = Barrier(machines)

    def begin(number: int) -> str | None:
        start.wait(WITHIN_S)
        engine = open_engine(database_url)
        try:
            return open_secrets(engine, tmp_path / str(number), None, makes_file=True).fingerprints[0]
        except WrongKeys:
            return None

    with ThreadPoolExecutor(machines) as pool:
        won = [fingerprint for fingerprint in pool.map(begin, range(machines)) if fingerprint]
    assert list(states(open_engine(database_url)).items()) == [(won[0], "primary")]
    assert len(won) == 1
    assert len(list(tmp_path.glob("*/fernet.key"))) == 1


def test_the_keys_of_a_database_from_before_are_those_that_decrypt_it(engine: Engine, home: Path) -> None:
    oldest, old, unused = new_key(), new_key(), new_key()
    for key in (oldest, old):
        with Store(engine, secrets=Secrets([key], source="before")) as store:
            add(store, f"by {key[:4]}")
    with pytest.raises(UnusableKey, match="written with another key than the setting fernet_keys has"):
        open_secrets(engine, home, unused, makes_file=True)
    with pytest.raises(UnusableKey, match="there is no key file"):
        open_secrets(engine, home, None, makes_file=True)
    assert states(engine) == {}
    open_secrets(engine, home, f"{old},{unused},{oldest}", makes_file=True)
    assert states(engine) == {fingerprint_of(old): "primary", fingerprint_of(oldest): "superseded"}
    with pytest.raises(WrongKeys, match=f"the key {fingerprint_of(oldest)};"):
        open_secrets(engine, home, old, makes_file=True)


# --- a rotation ----------------------------------------------------------------------------------


def test_a_rotation_that_is_killed_at_any_point_goes_on_where_it_was(engine: Engine, home: Path, query: Query) -> None:
    with opened(engine, home) as store:
        (old,) = store.database.secrets.fingerprints
        names = [f"w{number}" for number in range(5)]
        add(store, *names)
        store.tasks.variables.put("v", b"value")
        store.tasks.connections.put("c", b"uri")
    with opened(engine, home) as killed:  # after the first step
        new = killed.keys.begin_rotation(makes_key=True)
    assert states(engine) == {new: "primary", old: "superseded"}
    with opened(engine, home) as killed:  # after one batch
        assert killed.keys.begin_rotation(makes_key=True) == new
        assert killed.keys.encrypt_again("trigger.kwargs", 0, rows_max=2).rewritten == 2
    with opened(engine, home) as last:
        assert last.keys.begin_rotation(makes_key=True) == new, "no third key is made"
        assert rotate_batches(last) == 3 + 2
        assert last.keys.retire(new) == [old]
    assert states(engine) == {new: "primary", old: "retired"}
    only_new = (home / KEY_FILE_NAME).read_text().splitlines()[0]
    with opened(engine, home, only_new) as store:
        epoch = register(store)
        claimed = store.claim_triggers(epoch, limit=10, queues=("default",))
        assert [trigger.error for trigger in claimed] == [""] * 5
        assert store.tasks.variables.get("v") == b"value"
        assert store.tasks.connections.get("c") == b"uri"


def test_a_supervisor_that_runs_goes_on_through_a_rotation(engine: Engine, home: Path, database_url: str) -> None:
    with opened(engine, home) as running, opened(open_engine(database_url), home) as rotating:
        add(running, "before")
        epoch = register(running)
        new = rotating.keys.begin_rotation(makes_key=True)
        running.tasks.variables.put("v", b"during")
        assert rotate_batches(rotating) == 1, "the variable is under the new key already"
        assert rotating.keys.retire(new)
        (claimed,) = running.claim_triggers(epoch, limit=10, queues=("default",))
        assert claimed.error == ""
        assert rotating.tasks.variables.get("v") == b"during"


def test_a_key_that_is_here_and_unused_is_taken_before_one_is_made(engine: Engine, home: Path) -> None:
    old, new = new_key(), new_key()
    with opened(engine, home, old) as store, pytest.raises(UnusableKey, match="has no key that is new"):
        store.keys.begin_rotation(makes_key=False)
    with (
        opened(engine, home, old) as store,
        pytest.raises(UnusableKey, match="cannot be changed from here"),
    ):
        store.keys.begin_rotation(makes_key=True)
    with opened(engine, home, f"{old},{new}") as store:
        assert store.keys.begin_rotation(makes_key=True) == fingerprint_of(new)


def test_a_machine_that_lacks_the_new_key_writes_nothing_with_the_old_one(engine: Engine, home: Path) -> None:
    old, new = new_key(), new_key()
    with opened(engine, home, old) as behind, opened(engine, home, f"{old},{new}") as rotating:
        rotating.keys.begin_rotation(makes_key=False)
        with pytest.raises(WrongKeys, match=f"the key {fingerprint_of(new)};"):
            behind.tasks.variables.put("v", b"x")
        assert behind.tasks.variables.listed() == []


def test_a_key_is_not_retired_by_who_rotated_to_a_key_that_is_not_the_primary_one_any_more(
    engine: Engine, home: Path
) -> None:
    keys = [new_key() for _ in range(3)]
    with opened(engine, home, ",".join(keys)) as store:
        second = store.keys.begin_rotation(makes_key=False)
        assert store.keys.retire(second) == [fingerprint_of(keys[0])]
        assert store.keys.begin_rotation(makes_key=False) == fingerprint_of(keys[2])
        assert store.keys.retire(second) is None
    assert states(engine)[second] == "superseded"


def test_a_process_that_misses_the_new_key_takes_nothing_and_blames_no_row(
    engine: Engine, home: Path, query: Query
) -> None:
    """It is asked to read what others have encrypted again, with a key that it can get: then all goes on."""
    with opened(engine, home) as store, opened(engine, home) as rotating:
        tasks = Tasks(store, query)
        _, trigger_id = tasks.defer_it()
        add(store, "unclaimed")
        store.tasks.variables.put("v", b"x")
        copy = (home / KEY_FILE_NAME).read_bytes()
        rotating.keys.begin_rotation(makes_key=True)
        rotate_batches(rotating)
        with_new_key = (home / KEY_FILE_NAME).read_bytes()
        (home / KEY_FILE_NAME).write_bytes(copy)
        epoch = tasks.epoch
        verbs: list[Callable[[], object]] = [
            lambda: store.claim_triggers(epoch, limit=10, queues=("default",)),
            lambda: store.claimed_triggers(epoch),
            lambda: store.take_changes(epoch, [trigger_id]),
            lambda: store.tasks.variables.get("v"),
            tasks.dispatch,
        ]
        assert [each for each in verbs[:-1] if not _raises_wrong_keys(each)] == []
        assert len(query("SELECT 1 FROM trigger WHERE triggerer_id IS NULL")) == 1
        query(
            "UPDATE task_instance SET state = 'scheduled', trigger_id = NULL, token = NULL WHERE id = :id", id=tasks.a
        )
        assert _raises_wrong_keys(verbs[-1])
        assert tasks.row()["state"] == "scheduled"

        (home / KEY_FILE_NAME).write_bytes(with_new_key)
        assert [claimed.error for claimed in store.claim_triggers(epoch, limit=10, queues=("default",))] == [""]
        assert store.tasks.variables.get("v") == b"x"
        (task,) = tasks.dispatch()
        assert (task.next_kwargs, task.error) == (WAIT.next_kwargs, "")


def _raises_wrong_keys(verb: Callable[[], object]) -> bool:
    try:
        verb()
    except WrongKeys:
        return True
    return False


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_rotation_waits_for_a_transaction_that_encrypts_with_the_old_key(
    engine: Engine, home: Path, database_url: str
) -> None:
    rotated = Event()

    def rotate() -> None:
        with opened(open_engine(database_url), home) as rotating:
            rotating.keys.begin_rotation(makes_key=True)
            rotated.set()

    with opened(engine, home) as store, ThreadPoolExecutor(1) as pool:
        (old,) = store.database.secrets.fingerprints
        with store.database.writing() as tx:
            token = tx.encrypt(b"x")
            future = pool.submit(rotate)
            wait_until_blocked(open_engine(database_url))
            assert not rotated.is_set()
        future.result(WITHIN_S)
        assert store.database.secrets.decrypt_with_key(token)[1] == old
        with store.database.writing() as tx:
            assert store.database.secrets.decrypt_with_key(tx.encrypt(b"y"))[1] != old


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_row_that_another_transaction_holds_is_left_for_the_next_look(
    engine: Engine, home: Path, database_url: str
) -> None:
    with opened(engine, home) as store, open_engine(database_url).begin() as other:
        add(store, "held", "free")
        store.keys.begin_rotation(makes_key=True)
        other.exec_driver_sql("SELECT 1 FROM trigger ORDER BY id LIMIT 1 FOR UPDATE")
        batch = store.keys.encrypt_again("trigger.kwargs", 0)
        assert (batch.rewritten, batch.left) == (1, 1)
        other.rollback()
        assert store.keys.encrypt_again("trigger.kwargs", 0).rewritten == 1


def test_a_value_that_no_key_decrypts_stays_as_it_is(engine: Engine, home: Path, query: Query) -> None:
    with opened(engine, home) as store:
        add(store, "w")
        query("UPDATE trigger SET kwargs = 'lost'")
        store.keys.begin_rotation(makes_key=True)
        batch = store.keys.encrypt_again("trigger.kwargs", 0)
        assert (batch.rewritten, batch.unreadable) == (0, 1)
    assert query("SELECT kwargs FROM trigger") == [{"kwargs": "lost"}]


def test_every_encrypted_column_is_rotated() -> None:
    """A column that is encrypted and not listed would be unreadable after the next rotation."""
    source = "\n".join(path.read_text() for path in Path(schema.__file__).parents[1].rglob("*.py"))
    comments = [line for line in source.splitlines() if "# encrypted" in line and "Column(" in line]
    assert len(comments) + 1 == len(ENCRYPTED), "the two tables of values share one definition"
