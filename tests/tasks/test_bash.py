"""Commands of bash: their output, their ends, and that nothing of them outlives the task."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.steps import StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.protocol.values import decode_value
from headgate.tasks import DAG, BashOperator
from headgate.tasks.bash import LINE_BYTES_MAX
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step


def bash(command: str, **options: Any) -> BashOperator:
    return BashOperator(task_id="bash", bash_command=command, **options)


def step(operator: BashOperator) -> StepOutcome:
    return run_step(operator, make_context(operator, run_id="run-1"))


def last_line(outcome: StepOutcome) -> Any:
    assert isinstance(outcome, StepSucceeded), outcome
    return decode_value(outcome.xcoms[0].value)


def held_open(path: Path) -> int:
    """A named pipe whose reader sees the end when the last process that has it open for writing is gone."""
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def wait_until_all_gone(reader: int) -> None:
    os.set_blocking(reader, True)
    while os.read(reader, 100):
        pass
    os.close(reader)


def killed_once_begun(operator: BashOperator, begun: Path) -> StepOutcome:
    """Run the operator's step in a thread, kill it once its command has opened ``begun``, and return the outcome."""
    os.mkfifo(begun)
    outcomes: list[StepOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(step(operator)))
    thread.start()
    assert begun.read_bytes() == b"\n"  # opening it waits for its writer
    operator.on_kill()
    thread.join()
    return outcomes[0]


def test_the_last_line_is_returned_and_every_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcome = step(bash("echo one; echo two >&2; printf 'three'"))
    assert last_line(outcome) == "three"
    assert [record.getMessage() for record in caplog.records] == ["one", "two", "three"]


def test_a_command_without_output_returns_an_empty_line() -> None:
    assert last_line(step(bash("true"))) == ""


def test_long_lines_and_binary_output_survive(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcome = step(
            bash(f"printf '\\xff\\x00\\n'; head -c {LINE_BYTES_MAX + 10} /dev/zero | tr '\\0' x; echo; echo")
        )
    assert last_line(outcome) == ""
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "\\xff\0"
    assert "".join(lines[1:]) == "x" * (LINE_BYTES_MAX + 10)


@pytest.mark.parametrize("length", [20_000, LINE_BYTES_MAX, LINE_BYTES_MAX + 1, XCOM_BYTES_MAX - 100])
def test_a_long_last_line_is_returned_whole(length: int) -> None:
    command = f"echo before; printf '<'; head -c {length - 2} /dev/zero | tr '\\0' x; printf '>'"
    line = "<" + "x" * (length - 2) + ">"
    assert last_line(step(bash(command))) == line
    assert last_line(step(bash(f"{command}; echo"))) == line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("head -c 100000 /dev/zero | tr '\\0' x", "the last line of the command's output needs 100,000 bytes"),
        ("head -c 20000 /dev/zero", "needs 120,0"),  # each takes six bytes
    ],
)
def test_a_last_line_that_is_too_long_for_an_xcom_is_refused_and_not_cut(command: str, said: str) -> None:
    outcome = step(bash(command))
    assert isinstance(outcome, StepFailed)
    assert said in outcome.error
    assert "the limit is 49,152" in outcome.error
    assert last_line(step(bash(f"{command}; echo; echo"))) == ""


def test_more_output_than_a_pipe_holds_is_all_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert last_line(step(bash("seq 1 50000"))) == "50000"
    assert len(caplog.records) == 50_000


def test_an_exit_code_fails_the_try_and_tells_the_last_line() -> None:
    outcome = step(bash("echo broken; exit 7"))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "BashFailed: the command ended with exit code 7; the last line of its output: 'broken'"
    assert outcome.may_retry


def test_a_signal_fails_the_try_and_is_named() -> None:
    outcome = step(bash("kill -TERM $$"))
    assert isinstance(outcome, StepFailed)
    assert "the command ended with signal 15" in outcome.error


def test_one_exit_code_skips() -> None:
    assert isinstance(step(bash("exit 99")), StepSkipped)
    assert isinstance(step(bash("exit 3", skip_on_exit_code=3)), StepSkipped)
    assert isinstance(step(bash("exit 99", skip_on_exit_code=None)), StepFailed)


def test_the_environment_is_the_one_given_or_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OF_THE_WORKER", "w")
    command = 'echo "$OF_THE_WORKER-$MINE"; cd "$PWD"'
    assert last_line(step(bash(command))) == "w-"
    assert last_line(step(bash(command, env={"MINE": "m"}))) == "-m"
    assert last_line(step(bash(command, env={"MINE": "m"}, append_env=True))) == "w-m"
    assert last_line(step(bash("pwd", cwd=str(tmp_path)))) == str(tmp_path)


def test_what_a_command_leaves_in_the_background_ends_with_it(tmp_path: Path) -> None:
    reader = held_open(tmp_path / "alive")
    outcome = step(bash(f"exec 9>'{tmp_path / 'alive'}'; sleep 1000 & echo done"))
    assert last_line(outcome) == "done"
    wait_until_all_gone(reader)


def test_what_left_the_group_is_not_waited_for(tmp_path: Path) -> None:
    reader = held_open(tmp_path / "alive")
    # It holds the output open, in a session of its own, and tells its number.
    outcome = step(bash(f"exec 9>'{tmp_path / 'alive'}'; setsid sleep 1000 & echo $!"))
    escaped = int(last_line(outcome))
    os.kill(escaped, signal.SIGKILL)
    wait_until_all_gone(reader)


@pytest.mark.parametrize("trap", ["", "trap 'echo asked; exit 0' TERM;"])
def test_a_kill_ends_the_whole_group(tmp_path: Path, trap: str) -> None:
    reader = held_open(tmp_path / "alive")
    begun = tmp_path / "begun"
    operator = bash(f"{trap} exec 9>'{tmp_path / 'alive'}'; sleep 1000 & echo >'{begun}'; wait")
    outcome = killed_once_begun(operator, begun)
    wait_until_all_gone(reader)
    if trap:
        assert last_line(outcome) == "asked"
    else:
        assert "signal 15" in getattr(outcome, "error", "")


def test_a_command_that_will_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.tasks.bash.KILL_GRACE_S", 0.0)
    begun = tmp_path / "begun"
    operator = bash(f"trap '' TERM; echo >'{begun}'; while true; do sleep 1000; done")
    assert "signal 9" in getattr(killed_once_begun(operator, begun), "error", "")


class Interrupts(logging.Handler):
    """Stands for a Ctrl-C in the midst of the output."""

    def emit(self, record: logging.LogRecord) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_of_the_step_ends_the_group_and_is_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader = held_open(tmp_path / "alive")
    operator = bash(f"exec 9>'{tmp_path / 'alive'}'; sleep 1000 & echo begun; wait")
    interrupts = Interrupts()
    operator.log.addHandler(interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(operator)
    finally:
        operator.log.removeHandler(interrupts)
    wait_until_all_gone(reader)


def test_a_kill_that_comes_before_the_command_is_there_is_not_forgotten() -> None:
    operator = bash("sleep 1000")
    operator.on_kill()
    assert "signal 9" in getattr(step(operator), "error", "")


def test_a_kill_that_comes_after_the_end_does_nothing() -> None:
    operator = bash("true")
    assert isinstance(step(operator), StepSucceeded)
    operator.on_kill()


@pytest.mark.parametrize("command", ["", "echo \0", None])
def test_a_command_that_is_none_is_refused(command: Any) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match="task 'bash': bash_command must be a str that is not empty"):
        bash(command)
