"""The files of docs/deferral.md, run by a real ``headgate up`` as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.conftest import StartStation

DOCUMENT = Path(__file__).parents[2] / "docs" / "deferral.md"
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_examples_do_what_the_document_says(start_station: StartStation, tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    files = BLOCK.findall(text)
    assert len(files) == text.count("```python\n") == 2
    for name, source in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    station = start_station(import_paths=".")
    run = station.run("nightly").wait(report="deferred")
    (tmp_path / "made" / f"{run.run_id}.new").write_text("twelve orders\nand no complaint\n")
    (tmp_path / "made" / f"{run.run_id}.new").rename(tmp_path / "made" / f"{run.run_id}.txt")
    assert run.wait_end() == {"report": "success", "send": "success"}
    run.wait_logged("send", "sent: twelve orders")
    of_trigger = station.run("without_a_worker").wait(wait="deferred")
    assert not of_trigger.logged("wait", "begun"), "no worker has had it"
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "go").touch()
    assert of_trigger.wait_end() == {"wait": "success"}
