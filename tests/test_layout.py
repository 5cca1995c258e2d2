"""The three-folder rule and the limits of style, held by looking at the files."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = ("protocol", "runner", "supervisor")
SOURCES = sorted(path for root in (*ROOTS, "benchmarks") for path in (ROOT / root).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
README_LINES_MAX = 160  # what is longer belongs in docs/
FOLDER_MODULES_MAX = 15  # beside __init__ and conftest
# Folders that may hold more, how many, and why.
LARGE_FOLDERS = {
    "supervisor/headgate/cli/commands": (29, "one module for each command or group of commands"),
    "runner/headgate/brokers": (18, "one module for each broker, beside the base that they share"),
    "runner/headgate/streams": (16, "the parts of one stream, whose core is small"),
    "supervisor/headgate/scheduling": (17, "one module for each thing that is decided"),
    "supervisor/headgate/store/db/migrations/versions": (60, "one module for each change of the tables"),
    "tests/cli": (24, "one module for each command or group of commands, as there"),
    "tests/integration": (27, "real processes, one module for each subject"),
    "tests/web": (16, "one module for each subject of the pages"),
    "tests/proof/simulation": (20, "the world is one machine; the tasks' part of it is a folder already"),
}
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager2"}


def test_no_root_hides_the_others_with_an_init_file() -> None:
    assert [root for root in ROOTS if (ROOT / root / "headgate" / "__init__.py").exists()] == []


def test_a_root_holds_nothing_but_the_namespace() -> None:
    for root in ROOTS:
        strays = [p.name for p in (ROOT / root).iterdir() if p.name != "headgate" and p.suffix != ".md"]
        assert strays == [], f"{root}/ would make them top-level modules"


def test_the_wheel_takes_all_three_roots() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["dev-mode-dirs"] == list(ROOTS)
    assert build["targets"]["wheel"]["packages"] == [f"{root}/headgate" for root in ROOTS]


def test_every_package_says_what_it_is() -> None:
    packages = {path.parent for path in SOURCES}
    for package in packages:
        if "migrations" in package.parts:
            continue  # alembic reads the folder, nobody imports it
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        assert docstring, f"{package} has no docstring"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_folders_fit_the_limit() -> None:
    folders: Counter[str] = Counter()
    for path in (*SOURCES, *TESTS):
        if path.stem not in ("__init__", "conftest") and path.parent != ROOT / "benchmarks":  # flat: scripts
            folders[str(path.parent.relative_to(ROOT))] += 1
    too_large = {
        folder: modules
        for folder, modules in folders.items()
        if modules > LARGE_FOLDERS.get(folder, (FOLDER_MODULES_MAX, ""))[0]
    }
    assert too_large == {}, "split by subject, or list with a reason"
    assert [name for name in LARGE_FOLDERS if folders[name] <= FOLDER_MODULES_MAX] == [], "no longer large"


def test_modules_and_functions_fit_the_limits() -> None:
    """One test for all of them: a thousand would take each worker of pytest-xdist a second to collect."""
    offences = {str(path.relative_to(ROOT)): found for path in (*SOURCES, *TESTS) if (found := _offences(path))}
    assert offences == {}


def _offences(path: Path) -> list[str]:
    source = path.read_text()
    tree = ast.parse(source)
    found = []
    if (lines := len(source.splitlines())) > MODULE_LINES_MAX:
        found.append(f"has {lines} lines")
    if path.stem in BANNED_NAMES:
        found.append("has a name that says nothing")
    if (path.name != "__init__.py" or source.strip()) and not ast.get_docstring(tree):
        found.append("does not open with its idea")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                found.append(f"{node.name} has {length} lines")
    return found


@pytest.mark.parametrize(
    ("name", "source", "offences"),
    [
        ("good.py", '"""It."""\n' + "x = 1\n" * (MODULE_LINES_MAX - 1), []),
        ("__init__.py", "", []),
        ("utils.py", "x = 1\n" * (MODULE_LINES_MAX + 1), ["lines", "says nothing", "its idea"]),
        ("long.py", '"""It."""\nasync def long():\n' + "    x = 1\n" * FUNCTION_LINES_MAX, ["long has 71 lines"]),
    ],
)
def test_an_offence_is_found(tmp_path: Path, name: str, source: str, offences: list[str]) -> None:
    (tmp_path / name).write_text(source)
    found = _offences(tmp_path / name)
    assert len(found) == len(offences)
    assert all(words in each for words, each in zip(offences, found, strict=True))


def test_migrations_follow_one_another_in_the_order_of_their_names() -> None:
    from headgate.store.db.schema import HEAD_REVISION

    folder, before = "supervisor/headgate/store/db/migrations/versions", "None"
    for path in sorted((ROOT / folder).glob("0*.py")):
        found = dict(re.findall(r"^(revision|down_revision) = (.+)$", path.read_text(), re.MULTILINE))
        number = f'"{path.name[:4]}"'
        assert found == {"revision": number, "down_revision": before}, path.name
        before = number
    assert before == f'"{HEAD_REVISION}"'


@pytest.mark.parametrize(
    "name",
    [
        "headgate.triggers.base",
        "headgate.triggers.shared_stream",
    ],
)
def test_the_doors_name_only_what_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert [attribute for attribute in module.__all__ if not hasattr(module, attribute)] == []
