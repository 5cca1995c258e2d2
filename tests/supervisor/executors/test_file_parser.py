"""Parsing DAG files in a worker: whatever a file does, it is told as its own error, and the next one is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
from tests.supervisor.executors.workers_harness import Author, Parser, closing

from headgate.supervisor.executors import file_parser as parsing
from headgate.supervisor.executors import processes, single

GOOD = "with DAG('d'):\n    PythonOperator(task_id='t', python_callable=wait_for_ever)\n"


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


@pytest.fixture
def parser(tmp_path: Path) -> Iterator[Parser]:
    with closing(Parser(tmp_path)) as parser:
        yield parser


def test_a_file_is_parsed_to_its_dags(author: Author, parser: Parser) -> None:
    parsed = parser.parse(author.write(GOOD))
    assert [dag.dag_id for dag in parsed.dags] == ["d"]
    assert [task.task_id for task in parsed.dags[0].tasks] == ["t"]
    assert (parsed.error, parsed.traceback, parsed.more) == ("", "", False)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def broken(:", r"^SyntaxError: invalid syntax"),
        ("sys.exit(3)", r"^SystemExit: 3$"),
        ("raise KeyboardInterrupt", r"^KeyboardInterrupt: $"),
        ("os._exit(3)", r"^the process that parsed it exited with code 3$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^the process that parsed it killed by SIGKILL$"),
        ("from headgate.child.queries import send_query; send_query(1)", r"^NoQueryHandler: int cannot be sent here"),
    ],
)
def test_a_broken_file_is_an_error_of_its_own(author: Author, parser: Parser, source: str, error: str) -> None:
    parsed = parser.parse(author.write("print('said before', file=sys.__stderr__, flush=True)\n" + source))
    assert re.search(error, parsed.error), parsed.error
    assert not parsed.dags
    assert "dag.py" in parsed.traceback or "said before" in parsed.traceback
    assert parser.parse(author.write(GOOD, "good.py")).dags


def test_an_endless_file_is_ended_and_shown_where_it_hangs(author: Author, parser: Parser, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    file = author.write(f"def hangs():\n    Path('{begun}').write_text('yes')\n    wait_for_ever()\n\nhangs()")
    parsed = parser.parse(file, hangs_after=begun)
    assert parsed.error == "it took longer than 30 s to parse (dag_parse_timeout_s)"
    assert re.search(r'dag\.py", line \d+ in hangs', parsed.traceback)
    good = parser.parse(author.write(GOOD, "good.py"))
    assert good.dags
    assert parser.spawned == 2


def test_a_file_that_takes_too_much_memory_is_ended_and_the_limit_named(
    author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOK_INTERVAL_S", 0.05)
    with closing(Parser(tmp_path, memory_max_bytes=200 * 2**20)) as parser:
        parsed = parser.parse(author.write("held = bytearray(300 * 2**20)\nwait_for_ever()"))
        assert re.fullmatch(
            r"the process that parsed it used \d+ MiB of memory with what it has started; the limit is 200 MiB "
            r"\(worker_memory_max_mib\)",
            parsed.error,
        )
        assert parser.parse(author.write("held = bytearray(150 * 2**20)\n" + GOOD)).dags
        assert parser.parse(author.write(GOOD, "good.py")).dags
        assert parser.spawned == 3, "one that keeps so much is replaced"


def test_what_a_file_prints_says_which_file(author: Author, parser: Parser) -> None:
    file = author.write("print('printed')\nos.write(1, b'past Python\\n')\n" + GOOD)
    assert parser.parse(file).dags
    ((owner, record),) = parser.records
    assert (owner, record["event"], record["dag_file"]) == (str(file), "printed", str(file))
    assert parser.output == [(str(file), "past Python")]


def test_of_a_noisy_file_only_so_much_is_passed_on_and_what_is_left_out_is_counted(
    author: Author, parser: Parser
) -> None:
    noisy = "for _ in range(3000):\n    print('x' * 99)\n    os.write(1, b'y' * 99 + b'\\n')\n"
    with structlog.testing.capture_logs() as logs:
        assert parser.parse(author.write(noisy + GOOD)).dags
    passed_on = len(parser.records) + len(parser.output)
    assert 100 < passed_on < single.OUTPUT_CHARS_MAX / 99
    (note,) = [record for record in logs if record["event"] == "output of a DAG file was left out"]
    assert note["lines"] + passed_on == 6000
    assert parser.parse(author.write("print('heard again')\n" + GOOD)).dags
    assert parser.records[-1][1]["event"] == "heard again"


def test_dags_that_fill_more_than_a_frame_come_whole(author: Author, parser: Parser) -> None:
    source = "for n in range(8):\n    with DAG(f'd{n}', description='x' * 60_000):\n        for i in range(5000):\n"
    source += "            EmptyOperator(task_id=f'{i:0>200}', queue='q' * 250, pool='p' * 240)"
    parsed = parser.parse(author.write("from headgate.tasks.operators import EmptyOperator\n" + source))
    assert parsed.error == ""
    assert [dag.dag_id for dag in parsed.dags] == [f"d{n}" for n in range(8)]
    assert all(len(dag.tasks) == 5000 for dag in parsed.dags)


@pytest.mark.parametrize(
    ("dags", "tasks", "error"),
    [
        (40, 1, r"its 40 DAGs take 40 frames of 132,000 bytes; the limit is 32: spread them over several files$"),
        (2, 1000, r"FileParsed needs a frame of [\d,]+ bytes; the limit is 132,000"),
    ],
)
def test_what_takes_too_many_frames_or_fits_none_is_an_error_that_says_so(
    author: Author, tmp_path: Path, dags: int, tasks: int, error: str
) -> None:
    source = "from headgate.tasks.operators import EmptyOperator\n"
    source += f"for n in range({dags}):\n    with DAG(f'd{{n}}', description='x' * 60_000):\n"
    source += f"        for i in range({tasks}):\n            EmptyOperator(task_id=f'{{i:0>200}}')"
    with closing(Parser(tmp_path, frame_bytes_max=132_000)) as parser:
        parsed = parser.parse(author.write(source))
        assert re.search("^the DAGs of the file cannot be sent: " + error, parsed.error), parsed.error
        assert not parsed.dags
        assert parser.parse(author.write(GOOD, "good.py")).dags
        assert parser.spawned == 1


def test_a_file_that_changed_is_parsed_as_it_is_now(author: Author, parser: Parser) -> None:
    for number in (1, 2, 3):
        (author.folder / "helper.py").write_text(f"ID = 'd{number}'")
        file = author.write("import helper\nDAG(helper.ID)")
        assert [dag.dag_id for dag in parser.parse(file).dags] == [f"d{number}"]
    assert parser.spawned == 1


def test_a_parser_is_replaced_now_and_then(author: Author, parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "PARSER_FILES_MAX", 2)
    file = author.write(GOOD)
    for _ in range(5):
        assert parser.parse(file).dags
    assert parser.spawned == 3


def test_a_parser_is_killed_with_whatever_the_file_has_started(author: Author, parser: Parser, tmp_path: Path) -> None:
    started = tmp_path / "pid"
    source = f"Path('{started}').write_text(str(subprocess.Popen(['sleep', '1000']).pid))\nwait_for_ever()"
    assert "longer than 30 s" in parser.parse(author.write(source), hangs_after=started).error
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or state.read_bytes().rpartition(b")")[2].split()[0] == b"Z"
