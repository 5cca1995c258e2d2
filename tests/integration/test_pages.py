"""docs/dags.md and docs/operating.md: their files are run, and what they quote of the code stands there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.integration.conftest import StartStation
from tests.waiting import WITHIN_S, wait_until

from headgate.supervisor import commands, setting_sources
from headgate.tasks.parsing import ParsedFile, parse_file

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "docs" / "dags.md"
OPERATING = ROOT / "docs" / "operating.md"
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files of docs/dags.md."""
    for name, source in BLOCK.findall(DAGS.read_text()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return tmp_path


def section(page: Path, heading: str) -> str:
    """What stands under a heading of the second level."""
    text = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"{page.name} has no {heading!r}"
    return text


# --- docs/dags.md --------------------------------------------------------------------------------


def test_every_dag_file_is_parsed(files: Path) -> None:
    text = DAGS.read_text()
    assert len(BLOCK.findall(text)) == text.count("```python\n") > 0
    parsed = {path.name: parse_file(path) for path in (files / "dags").iterdir()}
    assert {name: file.error for name, file in parsed.items()} == dict.fromkeys(parsed, "")
    assert len(tasks_of(parsed["orders.py"])) == 6
    assert len(tasks_of(parsed["shapes.py"])) == 6
    assert tasks_of(parsed["values.py"]) == ["show"]
    assert len(tasks_of(parsed["mapped.py"])) == 5
    assert len(tasks_of(parsed["grouped.py"])) == 10


def tasks_of(file: ParsedFile) -> list[str]:
    (dag,) = file.dags
    return [task.task_id for task in dag.tasks]


@pytest.mark.parametrize(
    "arguments",
    [
        ("ours.py",),
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py", "test_mapped.py", "test_grouped.py"),
    ],
)
def test_every_other_file_runs(files: Path, arguments: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=files, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_whole_dag_does_what_the_page_says(start_station: StartStation, files: Path) -> None:
    (files / "dags" / "values.py").unlink()  # it wants a connection
    (files / "dags" / "shapes.py").unlink()
    station = start_station(import_paths=".")
    station.store.tasks.set_pool("shop", 2)
    run = station.run("orders", least=9000)
    states = dict.fromkeys(("export", "read", "choose", "nothing_to_tell", "close"), "success") | {"tell": "skipped"}
    assert run.wait_end() == states
    assert run.row("read")["try_number"] == 2
    run.wait_logged("close", "closed with a total of 7050")


def test_the_mapped_dag_does_what_the_page_says(start_station: StartStation, files: Path) -> None:
    station = start_station(import_paths=".")
    run = station.run("mapped")
    assert run.wait_end() == dict.fromkeys(("list_shops", "add_up", "copy", "compare", "report"), "success")
    run.wait_logged("report", "2 shops, 2090 in all; copied: ['to berlin', 'to bonn', 'to kiel']")
    rows = station.query("SELECT task_id, map_index, map_name, state FROM task_instance WHERE map_index >= 0")
    of_shops = sorted((row["map_index"], row["map_name"], row["state"]) for row in rows if row["task_id"] == "add_up")
    assert of_shops == [(0, "berlin", "success"), (1, None, "skipped"), (2, "kiel", "success")]
    assert len([row for row in rows if row["task_id"] == "compare"]) == 6


def test_the_grouped_dag_does_what_the_page_says(start_station: StartStation, files: Path) -> None:
    station = start_station(import_paths=".")
    run = station.run("grouped")
    body = ("load.fetch", "load.store", "refine.improve", "refine.evaluate", "refine.accurate_enough")
    others = ("days", "total", "show", "site.crawl", "site.pages")
    assert run.wait_end() == dict.fromkeys((*body, *others), "success")
    assert (run.xcom("total"), run.xcom("site.pages")) == (9, ["/", "/a", "/b", "/c"])
    run.wait_logged("show", "1.41421356")
    (row,) = station.query("SELECT count(*) AS iterations FROM task_instance WHERE task_id = 'refine.improve'")
    assert row["iterations"] == 1 + 4  # and the task itself


def test_the_first_run_of_the_schedule_is_there_at_once(start_station: StartStation, files: Path) -> None:
    station = start_station(import_paths=".")
    station.store.tasks.set_pool("shop", 2)
    station.wait_dag("orders")
    (row,) = wait_until(lambda: station.query("SELECT run_id, run_type FROM dag_run"), "the first run")
    assert row["run_type"] == "scheduled"
    assert re.fullmatch(r"scheduled__\d{4}-\d\d-\d\dT00:00:00\+00:00", row["run_id"])


# --- docs/operating.md ---------------------------------------------------------------------------


def test_the_sample_of_settings_is_taken(tmp_path: Path) -> None:
    (sample,) = re.findall(r"^```toml\n(.*?)^```$", OPERATING.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / setting_sources.FILE_NAME).write_text(sample)
    resolved = setting_sources.resolve_settings(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    given = {key for key, source in resolved.sources.items() if source != "default"}
    assert given == tomllib.loads(sample).keys()
    assert resolved.settings.dags_folder == tmp_path / "dags"


def test_every_exit_code_is_explained() -> None:
    told = re.findall(r"^\| (\d) \|", section(OPERATING, "As a service"), re.MULTILINE)
    codes = [value for name, value in vars(commands).items() if name.startswith("EXIT_")]
    assert [int(code) for code in told] == sorted({*codes, 2})


def test_every_record_to_be_told_of_is_written_by_some_module() -> None:
    rows = section(OPERATING, "What to watch").partition("| `event` |")[2].splitlines()
    quoted = [event for row in rows if row.startswith("| `") for event in re.findall(r"`([^`]+)`", row.split("|")[1])]
    events = [event for event in quoted if " " in event and not event.startswith(";")]
    assert len(events) > 10
    # A text may be split over lines, and its parts are joined by the compiler.
    sources = "\n".join(path.read_text() for root in ("runner", "supervisor") for path in (ROOT / root).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*"', "", sources)
    assert [event for event in events if f'"{event}"' not in joined] == []
