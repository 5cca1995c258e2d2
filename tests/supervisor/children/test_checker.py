"""The check of a trigger in a child process: it ends in time, however the author's code behaves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.processes import ends

from headgate.protocol.messages.checks import TriggerChecked
from headgate.protocol.values import encode_value
from headgate.supervisor.children.checker import check_trigger
from headgate.supervisor.children.process import scrub

SOURCE = """
from headgate.triggers.base import BaseTrigger, TriggerEvent

class Good(BaseTrigger):
    def __init__(self, text=""):
        pass
    def serialize(self):
        return "users.Good", {}
    async def run(self):
        yield TriggerEvent(1)
"""


def check(folder: Path, source: str, *, text: str = "", timeout_s: float = 60.0) -> TriggerChecked:
    (folder / "users.py").write_text(source)
    kwargs = encode_value({"text": text} if text else {}, where="kwargs")
    environment = scrub(os.environ, passed=(), secrets=())
    return check_trigger("users.Good", kwargs, import_paths=[str(folder)], environment=environment, timeout_s=timeout_s)


def test_a_good_class_has_no_problem_whatever_it_prints(tmp_path: Path) -> None:
    noisy = "import sys\nfor _ in range(3000):\n    print('x' * 1000)\n    print('y' * 1000, file=sys.stderr)\n"
    assert check(tmp_path, noisy + SOURCE) == TriggerChecked()


def test_kwargs_that_are_larger_than_any_buffer_arrive(tmp_path: Path) -> None:
    assert check(tmp_path, SOURCE, text="x" * 1_000_000) == TriggerChecked()


def test_a_class_that_takes_too_long_to_load_is_named_and_its_processes_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = (
        "import os, pathlib, subprocess, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "(folder / 'pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "print('loading', flush=True)\n"  # wakes the checker, for which the time is over now
        "time.sleep(1000)\n"
    )
    passed = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: passed() + 60.0 * (tmp_path / "pids").exists())
    assert check(tmp_path, slow).problem == "loading users.Good takes longer than 60 s"
    pids = (tmp_path / "pids").read_text().split()
    assert all(ends(int(pid)) for pid in pids)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os; os._exit(3)", "the process that loads users.Good ended: exited with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "the process that loads users.Good ended: killed by SIGSEGV"),
        ("raise SystemExit('no')", "SystemExit: no"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_class_that_ends_its_process_is_a_problem_in_words(tmp_path: Path, source: str, problem: str) -> None:
    assert check(tmp_path, source).problem.startswith(problem)


def test_a_thread_that_does_not_end_holds_up_nothing(tmp_path: Path) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    assert check(tmp_path, thread + SOURCE) == TriggerChecked()


def test_the_authors_code_sees_no_settings_of_headgate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_FERNET_KEYS", "a-secret-key")
    look = "import os\nassert not [name for name in os.environ if name.startswith('HEADGATE_')]\n"
    assert check(tmp_path, look + SOURCE) == TriggerChecked()
