"""The examples of docs/consuming.md and docs/signals.md, run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.client.harness import Watched
from tests.signal_server.test_command import TOKEN, serving
from tests.store.harness import migrated_sqlite
from tests.waiting import ALL_WITHIN_S

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

DOCS = Path(__file__).parents[2] / "docs"
FILES = {
    "consuming.md": {"read.py", "follow.py", "bill.py"},
    "signals.md": {
        "notify.py",
        "notify_far.py",
        "dags/train.py",
        "dags/evaluate.py",
        "dags/labels.py",
        "dags/follow.py",
        "dags/ingest.py",
        "dags/gate.py",
        "dags/score.py",
    },
}
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, secrets: Secrets) -> Path:
    """A folder with the files of the document, and the database that they use."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "headgate.db").write_bytes(migrated_sqlite())
    with Store(open_engine(f"sqlite:///{tmp_path}/home/headgate.db"), secrets=secrets) as store:
        watched = Watched(store, "big-orders")
        watched.store_events({"order": 2, "amount": 1800}, {"order": 3, "amount": 5000})
    for document in FILES:
        for name, source in BLOCK.findall((DOCS / document).read_text()):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source)
    return tmp_path


def run(folder: Path, name: str, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=ALL_WITHIN_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("document", FILES)
def test_every_python_block_of_the_document_is_a_file_and_run_here(document: str) -> None:
    text = (DOCS / document).read_text()
    assert {name for name, _ in BLOCK.findall(text)} == FILES[document]
    assert len(BLOCK.findall(text)) == text.count("```python\n")


def test_the_events_are_read_by_a_cursor(folder: Path) -> None:
    assert run(folder, "read.py") == ["2 1800", "3 5000", "go on after 1:2"]


def test_a_follower_ends_when_nothing_comes_and_a_consumer_waits(folder: Path) -> None:
    assert run(folder, "follow.py") == ["shipped 2"]


def test_each_event_is_billed_once(folder: Path) -> None:
    assert run(folder, "bill.py") == ["billed 2 orders, and is at 1:2"]
    assert run(folder, "bill.py") == ["billed 0 orders, and is at 1:2"]


def test_signals_are_sent_once_and_listened_to(folder: Path) -> None:
    for _ in range(2):  # the second one has the same dedup
        assert run(folder, "notify.py") == ["sent version 1", "1 {'auc': 0.93}"]


def test_signals_are_sent_once_over_grpc(folder: Path) -> None:
    token = {"HEADGATE_SIGNALS_TOKEN": TOKEN}
    with serving(f"sqlite:///{folder}/home/headgate.db", HEADGATE_SIGNALS_TOKEN=TOKEN) as (_, address):
        for _ in range(2):
            assert run(folder, "notify_far.py", SIGNALS=address, **token) == ["sent version 1", "1 {'auc': 0.93}"]
