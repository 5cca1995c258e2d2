"""Steps that are ended by a user or by a timeout, and hooks that do not go along with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.executors.workers_harness import Author, MakePool, Pool

from headgate.protocol.messages.queries import EncodedValue, Response
from headgate.protocol.messages.steps import StepSucceeded, XCom
from headgate.supervisor.executors.base import EndReason, StepLost, StepReturned

# --- being ended ---------------------------------------------------------------------------------

STANDS = """
    def f(context):
        folder = Path(__file__).parent
        try:
            (folder / "begun").touch()
            {wait}
        finally:
            (folder / "finally").touch()
"""


def test_a_user_ends_a_step_and_its_on_kill_is_called(author: Author, pool: Pool) -> None:
    step = author.step(STANDS.format(wait="wait_for_ever()"))
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    pool.executor.end(step.token, "user", "marked failed by a user")
    assert pool.wait_end(step) == StepLost(step.token, "marked failed by a user")
    assert (author.folder / "killed").read_text() == "on_kill"
    assert (author.folder / "finally").exists()
    (said,) = pool.logged("the step was stopped")
    assert (said["level"], "exception" in said) == ("info", False), "somebody wanted it"
    assert said["at"].startswith(step.file)
    assert said["at"].endswith(", in wait_for_ever"), "where it hung"


@pytest.mark.parametrize("why", ["timeout", "lost"])
def test_a_step_ended_by_its_timeout_has_no_on_kill(author: Author, pool: Pool, why: Any) -> None:
    """I14."""
    step = author.step(STANDS.format(wait="wait_for_ever()"))
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    pool.executor.end(step.token, why, "execution_timeout: 5 s are over")
    assert pool.wait_end(step) == StepLost(step.token, "execution_timeout: 5 s are over")
    assert (author.folder / "finally").exists()
    assert not (author.folder / "killed").exists()
    assert pool.logged("the step was stopped")[0]["exception"].count("wait_for_ever")


def test_a_step_that_makes_an_error_of_being_stopped_is_ended_all_the_same(author: Author, pool: Pool) -> None:
    wait = "\n            ".join(["try: wait_for_ever()", "except BaseException: raise ValueError('made of it')"])
    step = author.step(STANDS.format(wait=wait))
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    pool.executor.end(step.token, "timeout", "too long")
    assert pool.wait_end(step) == StepLost(step.token, "too long")


@pytest.mark.parametrize(
    "wait",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / 'deaf').touch(); wait_for_ever()",
        # Blocked in C, where no Python code runs, not even a handler of a signal.
        "(folder / 'deaf').touch(); [ctypes.PyDLL(None).pthread_mutex_lock(m) for m in [bytes(64)] * 2]",
    ],
)
def test_a_step_that_does_not_end_is_killed_after_a_grace_with_all_it_started(
    author: Author, make_pool: MakePool, wait: str
) -> None:
    pool = make_pool(end_grace_s=0.2)
    start = "subprocess.Popen(['sh', '-c', f'echo $$ > {folder}/pid; exec sleep 1000'], process_group=0)\n            "
    step = author.step(STANDS.format(wait=start + wait))
    pool.executor.submit(step)
    pid_file = author.folder / "pid"
    deaf = author.folder / "deaf"
    pool.until(lambda: deaf.exists() and pid_file.exists() and pid_file.read_text().strip(), "the step's begin")
    pool.executor.end(step.token, "timeout", "too long")
    assert pool.wait_end(step) == StepLost(step.token, "too long")
    assert any("most recent call first" in line for _, line in pool.output), "where it was is told"
    # It was killed with the step, and is gone a moment later.
    pool.until(lambda: is_gone(int(pid_file.read_text())), "the end of what the step has started")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("why", ["user", "timeout"])
def test_a_bash_command_ends_with_its_step(author: Author, pool: Pool, why: EndReason) -> None:
    pid_file = author.folder / f"{why}.pid"
    file = author.write(
        f"""
        from headgate.tasks.bash import BashOperator
        with DAG("d"):
            BashOperator(task_id="t", bash_command="echo $$ > {pid_file}; sleep 1000")
        """
    )
    step = author.step_of(file)
    pool.executor.submit(step)
    pool.until(lambda: pid_file.exists() and pid_file.read_text().strip(), "the command's begin")
    pool.executor.end(step.token, why, "ended")
    assert pool.wait_end(step) == StepLost(step.token, "ended")
    # It was killed with the step, and is gone a moment later.
    pool.until(lambda: is_gone(int(pid_file.read_text())), "the end of what the step has started")


def test_a_hook_that_takes_too_long_is_not_waited_for(author: Author, make_pool: MakePool) -> None:
    pool = make_pool(hook_timeout_s=0.2)
    file = author.write(
        """
        class Stuck(BaseOperator):
            def execute(self, context):
                (Path(__file__).parent / "begun").touch()
                wait_for_ever()

            def on_kill(self):
                wait_for_ever()

        with DAG("d"):
            Stuck(task_id="t")
        """
    )
    step = author.step_of(file)
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    pool.executor.end(step.token, "user", "cancelled")
    assert pool.wait_end(step) == StepLost(step.token, "cancelled")
    assert pool.logged("a hook took too long")


def test_an_on_kill_may_ask_the_supervisor(author: Author, pool: Pool) -> None:
    file = author.write(
        """
        class Asks(BaseOperator):
            def execute(self, context):
                self.context = context
                (Path(__file__).parent / "begun").touch()
                wait_for_ever()

            def on_kill(self):
                (Path(__file__).parent / "killed").write_text(self.context["ti"].xcom_pull("other"))

        with DAG("d"):
            Asks(task_id="t")
        """
    )
    step = author.step_of(file)
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    pool.executor.end(step.token, "user", "cancelled")
    pool.until(pool.asked, "the query")
    pool.executor.answer(step.token, Response(pool.asked()[0].id, EncodedValue(b'"job-17"')))
    assert pool.wait_end(step) == StepLost(step.token, "cancelled")
    assert (author.folder / "killed").read_text() == "job-17"


def test_a_step_that_waits_for_an_answer_can_be_ended(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): context['ti'].xcom_pull('other')")
    pool.executor.submit(step)
    pool.until(pool.asked, "the query")
    pool.executor.end(step.token, "timeout", "too long")
    assert pool.wait_end(step) == StepLost(step.token, "too long")


def test_a_step_that_no_worker_has_begun_as_its_supervisor_leaves_is_returned(author: Author, pool: Pool) -> None:
    """It costs no try."""
    step = author.step("def f(context): (Path(__file__).parent / 'begun').touch()")
    pool.executor.submit(step)
    pool.executor.end(step.token, "lost", "its supervisor leaves")
    assert pool.wait_end(step) == StepReturned(step.token)
    assert not (author.folder / "begun").exists()


def test_a_step_that_no_worker_has_begun_is_ended_at_once(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): (Path(__file__).parent / 'begun').touch()")
    pool.executor.submit(step)
    pool.executor.end(step.token, "user", "cancelled")
    assert pool.wait_end(step) == StepLost(step.token, "cancelled")
    assert pool.run(author.step("def f(context): return 1")) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))
    assert not (author.folder / "begun").exists()
