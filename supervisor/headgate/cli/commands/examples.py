"""``headgate examples``: DAG files to begin with, copied to a folder of the user's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError

PACKAGE = "headgate.examples"  # found and copied, never imported: DAG files are users' code


def examples(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to copy them to; it is made if it does not exist.")
    ],
) -> None:
    """Copy the example DAG files to a folder. If one of them is there already, nothing is copied."""
    files = _files()
    if taken := [file.name for file in files if (folder / file.name).exists()]:
        raise CommandError(f"nothing was copied: {folder} has {', '.join(taken)} already")
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"nothing was copied: {folder} is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        with open(folder / file.name, "xb") as copy:
            copy.write(file.read_bytes())
        print(f"wrote {folder / file.name}")
    print(f"next: `headgate up --dags {folder}`")


def _files() -> list[Path]:
    """Return the files of the examples, by name; only the namespace above them is imported to find them."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CommandError(f"this installation has no {PACKAGE}")
    found = (path for place in spec.submodule_search_locations for path in Path(place).glob("*.py"))
    return sorted(path for path in found if path.name != "__init__.py")
