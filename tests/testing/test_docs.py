"""The examples of the pages testing, streaming and brokers, and of docstrings, run as they are by another pytest."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from tests.waiting import ALL_WITHIN_S

from headgate.tasks import BaseOperator
from headgate.testing import Broker, crash_test, run_task, run_trigger, shared_stream
from headgate.testing.brokers.redis_station import find_server
from headgate.triggers.base import BaseEventTrigger, BaseTrigger
from headgate.triggers.shared_stream import SharedStreamProducer

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT, STREAMING, BROKERS = DOCS / "testing.md", DOCS / "streaming.md", DOCS / "brokers.md"
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IN_DOCSTRING = re.compile(r"::\n\n    # (\S+\.py)\n((?:    .*\n|\n)+)")
WITH_EXAMPLES = (
    BaseEventTrigger,
    BaseOperator,
    BaseTrigger,
    Broker,
    SharedStreamProducer,
    crash_test,
    run_task,
    run_trigger,
    shared_stream,
)
PLUGIN = "headgate.testing.plugin"


def write_examples(document: Path, folder: Path) -> Path:
    """Write the files of a document to a new folder."""
    for name, source in BLOCK.findall(document.read_text()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
    if not any(entry.value == PLUGIN for entry in importlib.metadata.entry_points(group="pytest11")):
        command += ["-p", PLUGIN]  # an installation made before the entry point was
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=ALL_WITHIN_S)


@pytest.mark.parametrize("document", [DOCUMENT, STREAMING, BROKERS], ids=lambda document: document.name)
def test_every_python_block_of_the_document_is_a_file(document: Path) -> None:
    text = document.read_text()
    assert len(BLOCK.findall(text)) == text.count("```python\n") > 0


def test_the_examples_of_streams_do_what_the_document_says(tmp_path: Path) -> None:
    ran = run_pytest(write_examples(STREAMING, tmp_path / "examples"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED test_users.py::") == 2


@pytest.mark.skipif(find_server() is None and "CI" not in os.environ, reason="there is no redis-server here")
@pytest.mark.campaign
def test_the_adapter_of_the_page_of_brokers_is_short_and_survives_kills(tmp_path: Path) -> None:
    examples = write_examples(BROKERS, tmp_path / "examples")
    adapter = (examples / "outbox.py").read_text().partition("\n\nclass OutboxTrigger")[0]
    assert len(adapter.strip().splitlines()) <= 60
    # Of the conformance suite one test is enough here: tests/brokers runs all of them, on the same server.
    ran = run_pytest(examples, "--headgate-kills", "4", "-k", "no_row or every_message_is_stored")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "PASSED test_outbox.py::test_no_row_is_lost_or_stored_twice" in ran.stdout
    assert "PASSED test_conformance.py::TestRedisStreams::test_every_message_is_stored" in ran.stdout
    assert re.search(r"SIGKILLs.*│ +4 │", ran.stdout)


@pytest.mark.campaign
def test_the_examples_do_what_the_document_says(tmp_path: Path) -> None:
    examples = write_examples(DOCUMENT, tmp_path / "examples")
    ran = run_pytest(examples, "--headgate-kills", "4")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    for path in examples.glob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            assert f"PASSED {path.name}::{name}" in ran.stdout
    assert re.search(r"SIGKILLs.*│ +4 │", ran.stdout), "the table is part of the summary"
    assert re.search(r"│ lost +│ +0 │", ran.stdout)


def test_the_examples_in_docstrings_do_what_they_say(tmp_path: Path) -> None:
    for documented in WITH_EXAMPLES:
        text = inspect.getdoc(documented)
        assert text is not None
        ((name, source),) = IN_DOCSTRING.findall(text + "\n")
        (tmp_path / name).write_text(dedent(source))
    ran = run_pytest(tmp_path, "--headgate-kills", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED test_") == len(list(tmp_path.glob("test_*.py"))) == 4
