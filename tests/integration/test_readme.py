"""The commands of the README's first DAG, run as they stand there, in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
WITHIN_S = 110.0  # a dozen commands, each of which takes half a second, and more on a busy machine


def test_a_first_dag_runs_as_the_readme_says(tmp_path: Path) -> None:
    section = README.read_text().partition("## A first DAG\n")[2].partition("\n## ")[0]
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = shell.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        told, _ = shell.communicate()
        told += "\n--- not within its time ---"
    said = told + "\n" + (tmp_path / "up.log").read_text()
    assert shell.returncode == 0, said
    assert "created run manual__" in told, said
    assert re.search(r"^wait_for_file .* wait +deferred ", told, re.MULTILINE), said
    assert "runs it, and it has not fired" in told, said
    assert "inbox/orders.csv has 2 rows" in told, said
    assert "its trigger has ended" in told, said
    assert re.search(r"^wait_for_file .* manual +success ", told, re.MULTILINE), said
