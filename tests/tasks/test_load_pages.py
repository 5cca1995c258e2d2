"""The example that loads pages, on a server of files as its docstring says."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headgate.tasks import DAG
from headgate.tasks.parsing import load_dags
from headgate.testing import run_task

PAGES = 12
PORT = "8765"  # the server's, in the example


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Leave standard error to the tests."""


@contextmanager
def serving(folder: Path, name: str = "load_pages.py") -> Iterator[Path]:
    """Serve pages of three users, the last one of one, from a new folder; yield an example, with the server's port."""
    folder.mkdir()
    for number in range(1, PAGES + 1):
        page: dict[str, Any] = {"users": [{"id": number}] * 3, "next": f"users-{number + 1}.json"}
        if number == PAGES:
            page = {"users": [{"id": number}]}
        (folder / f"users-{number}.json").write_text(json.dumps(page))
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        source = files("headgate.examples").joinpath(name).read_text()
        assert PORT in source
        example = folder / name
        example.write_text(source.replace(PORT, str(server.server_port)))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield example
        server.shutdown()
        thread.join()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DAG]:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "served") as file:
        yield load_dags(file)["load_pages"]


def loaded(folder: Path, run_id: str = "test") -> dict[int, int]:
    """How many users each page has that was written."""
    return {int(path.stem): len(json.loads(path.read_text())) for path in (folder / "loaded" / run_id).iterdir()}


def test_all_pages_are_loaded_by_one_trigger(example: DAG, tmp_path: Path) -> None:
    result = run_task(example.tasks["load"])
    assert result.value == 3 * (PAGES - 1) + 1
    assert loaded(tmp_path) == {number: 3 for number in range(PAGES - 1)} | {PAGES - 1: 1}
    assert len(result.deferrals) == 1


def test_a_page_that_is_not_there_fails_the_try_and_the_next_goes_on_with_it(example: DAG, tmp_path: Path) -> None:
    missing = tmp_path / "served" / "users-5.json"
    away = missing.rename(tmp_path / "away.json")
    failed = run_task(example.tasks["load"])
    assert (failed.state, failed.stream_state) == ("failed", {"users": 12})
    assert "/users-5.json: status 404" in failed.error
    assert loaded(tmp_path) == dict.fromkeys(range(4), 3)
    away.rename(missing)
    (tmp_path / "served" / "users-1.json").unlink()  # what was handled is not fetched again
    again = run_task(example.tasks["load"], after=failed, try_number=2)
    assert again.value == 3 * (PAGES - 1) + 1
    assert len(loaded(tmp_path)) == PAGES
