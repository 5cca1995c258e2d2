"""DAG files: what is in them comes out, and what is wrong with one is told with its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.protocol.messages.dags import decode_dag, encode_dag
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.steps import StepSucceeded
from headgate.tasks import DAG
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.tasks.graph import open_dag
from headgate.tasks.parsing import DAGS_PER_FILE_MAX, FILE_BYTES_MAX, load_dags, module_name, parse_file
from headgate.triggers.encoding import DAG_MODULES

GOOD = """
from headgate.tasks import DAG, EmptyOperator, task

with DAG("orders", schedule="@daily") as dag:
    EmptyOperator(task_id="a") >> EmptyOperator(task_id="b")

def make(name):
    with DAG(name):
        @task
        def answer():
            return 42
        answer()

make("made-in-a-function")
"""


@pytest.fixture(autouse=True)
def _no_modules_left() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(DAG_MODULES):
            del sys.modules[name]


def write(folder: Path, source: str | bytes, name: str = "orders.py") -> Path:
    path = folder / name
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return path


def test_the_dags_of_a_file_come_out_in_their_order(tmp_path: Path) -> None:
    parsed = parse_file(write(tmp_path, GOOD))
    assert (parsed.error, parsed.traceback) == ("", "")
    assert [spec.dag_id for spec in parsed.dags] == ["orders", "made-in-a-function"]
    assert [decode_dag(encode_dag(spec)) for spec in parsed.dags] == list(parsed.dags)
    assert parsed.dags[0].tasks[1].upstream == ("a",)


def test_a_loaded_task_can_be_run(tmp_path: Path) -> None:
    answer = load_dags(write(tmp_path, GOOD))["made-in-a-function"].tasks["answer"]
    outcome = run_step(answer, make_context(answer, run_id="run-1"))
    assert isinstance(outcome, StepSucceeded)
    assert outcome.xcoms[0].value == b"42"


def test_a_file_without_dags_has_none_and_no_error(tmp_path: Path) -> None:
    parsed = parse_file(write(tmp_path, "x = 1"))
    assert (parsed.dags, parsed.error) == ((), "")


@pytest.mark.parametrize(
    ("source", "error", "line"),
    [
        ("x = (", "SyntaxError: '(' was never closed", "x = ("),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", "import no_such_module"),
        ("raise SystemExit(3)", "SystemExit: 3", "raise SystemExit(3)"),
        (b"\xff", "SyntaxError: ", ""),
        # Which of the two it is depends on the patch version of CPython 3.11.
        (
            "x = '\0'",
            tuple(f"{kind}: source code string cannot contain null" for kind in ("SyntaxError", "ValueError")),
            "",
        ),
        (
            "from headgate.tasks import DAG\nDAG('orders', schedule='daily')",
            "DagMalformed: DAG 'orders': the cron expression 'daily' must have 5 fields, not 1",
            "DAG('orders', schedule='daily')",
        ),
        (
            "from headgate.tasks import DAG\nDAG('a')\nDAG('a')",
            "DagMalformed: DAG 'a': is made twice by this file",
            "",
        ),
        (
            "from headgate.tasks import *\nd = DAG('a')\nt = EmptyOperator(task_id='t', dag=d)\nt >> t",
            "DagMalformed: DAG 'a', task 't': is upstream of itself: t >> t",
            "",
        ),
    ],
)
def test_a_broken_file_is_an_error_with_its_traceback(
    tmp_path: Path, source: str | bytes, error: str | tuple[str, ...], line: str
) -> None:
    path = write(tmp_path, source)
    parsed = parse_file(path)
    assert parsed.dags == ()
    assert parsed.error.startswith(error)
    assert line in parsed.traceback
    assert not line or str(path) in parsed.traceback
    assert open_dag() is None


@pytest.mark.parametrize("name", ["helper_beside.py", "helper_beside/__init__.py"])
def test_a_module_beside_the_dag_file_is_not_found_and_the_error_says_where_to_put_it(
    tmp_path: Path, name: str
) -> None:
    helper = tmp_path / name
    helper.parent.mkdir(exist_ok=True)
    helper.write_text("x = 1\n")
    error = parse_file(write(tmp_path, "from helper_beside.deep import x")).error
    assert error.startswith("ModuleNotFoundError: No module named 'helper_beside'; ")
    assert f"{tmp_path}/helper_beside" in error
    assert error.endswith("import_paths (headgate config show): move it there, or add its folder")


def test_a_file_that_breaks_leaves_no_module(tmp_path: Path) -> None:
    path = write(tmp_path, "raise ValueError")
    parse_file(path)
    assert module_name(str(path)) not in sys.modules


def test_a_file_that_breaks_within_a_block_leaves_no_block_open(tmp_path: Path) -> None:
    source = "from headgate.tasks import DAG\nDAG('a').__enter__()\nraise ValueError('x' * 100_000)"
    parsed = parse_file(write(tmp_path, source))
    assert open_dag() is None
    assert len(parsed.error) == len(parsed.traceback) == ERROR_CHARS_MAX


def test_a_block_that_is_open_where_a_file_is_loaded_takes_nothing_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "from headgate.tasks import EmptyOperator\ntask = EmptyOperator(task_id='a')")
    with DAG("outside") as outside:
        assert load_dags(path) == {}
        assert open_dag() is outside
    assert dict(outside.tasks) == {}


def test_an_interrupt_is_for_whoever_parses(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        parse_file(write(tmp_path, "raise KeyboardInterrupt"))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert parse_file(tmp_path / "gone.py").error.startswith("FileNotFoundError: ")


def test_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    source = (
        "import sys\nfrom headgate.tasks import DAG\nDAG('in-' + __name__)\nassert sys.modules[__name__].DAG is DAG"
    )
    folders = [tmp_path / "one", tmp_path / "two"]
    names = []
    for folder in folders:
        folder.mkdir()
        path = write(folder, source)
        (dag_id,) = load_dags(path)
        names.append(dag_id)
        assert dag_id == f"in-{module_name(str(path))}"
    assert len(set(names)) == 2


def test_a_changed_file_is_read_anew_even_within_the_same_second(tmp_path: Path) -> None:
    path = write(tmp_path, "from headgate.tasks import DAG\nDAG('a')")
    assert list(load_dags(path)) == ["a"]
    stamp = path.stat().st_mtime_ns
    write(tmp_path, "from headgate.tasks import DAG\nDAG('b')")
    os.utime(path, ns=(stamp, stamp))
    assert list(load_dags(path)) == ["b"]
    assert list(tmp_path.iterdir()) == [path]  # and no compilation is left in the authors' folder


MODULE = """
from headgate.tasks import DAG
hidden = DAG("hidden")
named = DAG("named")
def made(): return DAG("by-function")
"""


def test_a_dag_of_a_module_is_that_of_files_which_name_it_however_often_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "dags_of_a_team.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    source = "from dags_of_a_team import made, named\nagain = named\nfrom headgate.tasks import DAG\nDAG('own')\nmade()"
    path = write(tmp_path, source)
    try:
        for _ in range(2):  # the second time the module is not run again
            assert list(load_dags(path)) == ["own", "by-function", "named"]
        assert list(load_dags(write(tmp_path, "import dags_of_a_team"))) == []
    finally:
        del sys.modules["dags_of_a_team"]


def test_a_module_that_a_file_runs_each_time_makes_its_dags_each_time(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("from headgate.tasks import DAG\nDAG('of-other')")
    path = write(
        tmp_path,
        "from importlib.machinery import SourceFileLoader\nfrom types import ModuleType\n"
        f"SourceFileLoader('other', {str(tmp_path / 'other.txt')!r}).exec_module(ModuleType('other'))",
    )
    for _ in range(2):
        assert list(load_dags(path)) == ["of-other"]


@pytest.mark.parametrize("statement", ["from . import other", "from .other import name"])
def test_a_relative_import_says_why_it_finds_nothing(tmp_path: Path, statement: str) -> None:
    error = parse_file(write(tmp_path, statement)).error
    assert error.startswith("ModuleNotFoundError: a DAG file belongs to no package, ")
    assert "import_paths" in error


def test_a_file_that_is_called_like_what_it_imports_is_not_to_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "absent_library.py"
    path.write_text("import absent_library")
    assert parse_file(path).error == "ModuleNotFoundError: No module named 'absent_library'"


def test_a_partial_that_is_never_expanded_is_an_error(tmp_path: Path) -> None:
    begun = "from headgate.tasks import DAG, task\n@task\ndef f(a, b): ...\nwith DAG('d'):\n    p = f.partial(a=1)\n"
    error = parse_file(write(tmp_path, begun)).error
    assert (
        error
        == "DagMalformed: DAG 'd', task 'f': is partial() alone, and no task: call .expand() or .expand_kwargs() of it"
    )
    assert list(load_dags(write(tmp_path, f"{begun}p.expand(b=[1])"))) == ["d"]


def test_a_file_that_takes_itself_out_of_the_modules_keeps_its_error(tmp_path: Path) -> None:
    path = write(tmp_path, "import sys\ndel sys.modules[__name__]\nraise ValueError('mine')")
    assert parse_file(path).error == "ValueError: mine"


def test_the_version_that_worked_stays_importable_when_the_next_one_breaks(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    load_dags(path)
    module = sys.modules[module_name(str(path))]
    write(tmp_path, "raise ValueError")
    assert parse_file(path).error == "ValueError: "
    assert sys.modules[module_name(str(path))] is module


def test_a_file_has_limits(tmp_path: Path) -> None:
    many = f"from headgate.tasks import DAG\nfor n in range({DAGS_PER_FILE_MAX + 1}): DAG(f'dag-{{n}}')"
    assert "makes 1001 DAGs; the limit is 1000" in parse_file(write(tmp_path, many)).error
    long = b"#" * (FILE_BYTES_MAX + 1)
    assert "is longer than 4,194,304 bytes" in parse_file(write(tmp_path, long)).error


def test_a_trigger_of_a_dag_file_is_no_trigger_to_defer_to(tmp_path: Path) -> None:
    source = """
from headgate.tasks import DAG, TaskDeferred, task
from headgate.triggers.temporal import DateTimeTrigger
from datetime import UTC, datetime

class Mine(DateTimeTrigger):
    pass

with DAG("orders"):
    @task
    def wait(event):
        raise TaskDeferred(trigger=Mine(datetime.now(UTC)), method_name="execute")
    wait()
"""
    wait = load_dags(write(tmp_path, source))["orders"].tasks["wait"]
    outcome = run_step(wait, make_context(wait, run_id="run-1"))
    assert "Mine is defined in a DAG file, which no runner imports" in getattr(outcome, "error", "")
