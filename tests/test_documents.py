"""What the documentation says of the code is so: generated tables, tests it names, commands it lists."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
import typer
from tests import documents
from tests.documents import DEFERRAL, DOCS, ROOT

from headgate.cli.main import app
from headgate.supervisor.metrics.catalogue import ALL, OF_SIGNAL_SERVERS

TESTS = ROOT / "tests"
STREAMING, SIGNALS, DAGS = (ROOT / "docs" / f"{name}.md" for name in ("streaming", "signals", "dags"))
CHECKED = (DEFERRAL, STREAMING, SIGNALS, DAGS)
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def checklist(page: Path, title: str, first_head: str) -> list[list[str]]:
    """The cells of the rows of the checklist of a page, without the heads of its tables."""
    text = page.read_text().partition(f"## {title}")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in rows if cells[0].strip() != first_head]


@pytest.mark.parametrize("path", documents.TABLES, ids=lambda path: path.name)
def test_the_tables_are_what_the_code_says(path: Path) -> None:
    assert documents.written(path) == path.read_text(), "`python -m tests.documents` writes them anew"


def test_every_alert_is_explained() -> None:
    rules = (resources.files("headgate.supervisor.metrics") / "rules.yml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == set(re.findall(r"`(Headgate\w+)`", (DOCS / "metrics.md").read_text()))
    used = set(re.findall(r"\bheadgate_\w+", rules))
    assert used <= {metric.full_name + end for metric in (*ALL, *OF_SIGNAL_SERVERS) for end in ("", "_sum")}, (
        "alerts on what is not measured"
    )


def test_every_test_that_the_checklist_names_is_there() -> None:
    named = [(name, TESTS / path) for page in CHECKED for path, name in NAMED.findall(page.read_text())]
    assert len(named) > 80
    assert [f"{path}::{name}" for name, path in named if not path.is_file() or name not in names_in(path)] == []


def test_every_row_of_the_checklist_names_a_test_or_says_why_not() -> None:
    rows = checklist(DEFERRAL, "Checklist", "heading")
    assert {len(cells) for cells in rows} == {4}
    proposed = [
        cells
        for page in (STREAMING, SIGNALS)
        for cells in checklist(page, "Beside Airflow's proposal", "the proposal says")
    ]
    assert {len(cells) for cells in proposed} == {3}
    mapped = checklist(DAGS, "Mapped tasks beside Airflow's", "Airflow")
    assert {len(cells) for cells in mapped} == {3}
    loops = checklist(DAGS, "Loops beside Airflow's", "Airflow")
    assert {len(cells) for cells in loops} == {3}
    tests = [cells[-1] for cells in rows + proposed + mapped + loops]
    assert [cell for cell in tests if not NAMED.search(cell) and not re.match(r" - \(.+\) $", cell)] == []


def commands() -> set[str]:
    """Every command there is, as it is called."""
    names = {command.name for command in app.registered_commands}
    for group in app.registered_groups:
        assert isinstance(group.typer_instance, typer.Typer)
        for command in group.typer_instance.registered_commands:
            assert command.callback is not None
            names.add(f"{group.name} {command.name or command.callback.__name__}")
    return {name for name in names if name is not None}


def test_the_page_of_commands_lists_every_command_and_no_other() -> None:
    table = (ROOT / "docs" / "commands.md").read_text()
    told: set[str] = set()
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        group = ""
        for words in re.findall(r"`([^`]+)`", line.split("|")[1]):
            words = [word for word in words.split() if re.fullmatch(r"[a-z][a-z-]*", word)]
            if words[0] == "headgate":
                words = words[1:]
                group = words[0]
            elif words[0] not in {name.split()[0] for name in commands()}:
                words = [group, *words]  # of the group that was named before
            told.add(" ".join(words))
    assert told == commands()


def calls_in(path: Path) -> list[str]:
    """The calls of headgate in the code of a page, or in backquotes in the strings of a module, without options."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        text = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    words = r"headgate ([a-z][a-z -]*)"
    return [call.strip() for call in (*re.findall(f"`{words}", text), *re.findall(f"^{words}", shell, re.MULTILINE))]


def test_every_command_that_the_code_or_a_page_names_is_there() -> None:
    modules = [path for folder in ("protocol", "runner", "supervisor") for path in (ROOT / folder).rglob("*.py")]
    there = commands()
    groups = {name.split()[0] for name in there if " " in name}
    missing, seen = [], 0
    for path in [*modules, ROOT / "README.md", *DOCS.glob("*.md")]:
        for words in calls_in(path):
            seen += 1
            name = " ".join(words.split()[:2]) if words.split()[0] in groups else words.split()[0]
            if name not in there | groups:
                missing.append(f"{path.name}: headgate {words}")
    assert missing == []
    assert seen > 400


def anchors_in(path: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_within_the_documentation_leads_somewhere() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    broken, seen = [], 0
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            seen += 1
            name, _, anchor = target.partition("#")
            led_to = page.parent / name if name else page
            if not led_to.exists() or (anchor and anchor not in anchors_in(led_to)):
                broken.append(f"{page.name}: {target}")
    assert broken == []
    assert seen > 10


def test_each_test_that_the_page_of_brokers_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "brokers.md").read_text()))
    assert len(named) > 20
    sources = [*TESTS.rglob("test_*.py"), ROOT / "runner/headgate/testing/brokers/conformance.py"]
    there = {name for path in sources for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert named - there == set()
