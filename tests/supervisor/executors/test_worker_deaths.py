"""Workers that die, by their step, by their memory, by a kill at any mark: only their own step is lost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.supervisor.executors.workers_harness import Author, MakePool, Pool

from headgate.protocol.marks import TASK_MARKS
from headgate.protocol.messages.steps import StepSucceeded, XCom
from headgate.protocol.values import decode_value
from headgate.supervisor.children import worker as worker_module
from headgate.supervisor.children.process import ChildProcess, scrub, start_worker
from headgate.supervisor.executors import processes
from headgate.supervisor.executors.base import StepLost, StepReturned
from headgate.testing.crash.killing import MarkedDeaths

# --- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("os._exit(7)", r"^the worker process exited with code 7; its last output was:\nlast words$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^the worker process killed by SIGKILL; .*\nlast words$"),
        ("ctypes.string_at(0)", r"killed by SIGSEGV; .*last words\nFatal Python error: Segmentation fault"),
        ("os.kill(os.getpid(), 40)", r"^the worker process killed by signal 40; .*\nlast words$"),
        ("os.closerange(3, 100); wait_for_ever()", r"killed by SIGKILL \(we did it: it has closed its link\)"),
        ("os.kill(os.getpid(), signal.SIGTERM); wait_for_ever()", r"exited with code 78"),
    ],
)
def test_a_worker_that_dies_costs_its_step_and_says_why(author: Author, pool: Pool, death: str, reason: str) -> None:
    lost = pool.run(author.step(f"def f(context):\n    os.write(2, b'last words\\n')\n    {death}"))
    assert isinstance(lost, StepLost)
    assert re.search(reason, lost.reason, re.DOTALL), lost.reason
    assert pool.run(author.step("def f(context): return 1")) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))


def test_a_dag_file_that_never_ends_costs_its_step_and_its_worker_within_the_limit(
    author: Author, make_pool: MakePool
) -> None:
    pool = make_pool(workers=1, load_timeout_s=30.0)
    looking, begun, may_end = (author.folder / name for name in ("looking", "begun", "may_end"))
    endless = author.step_of(author.write(f"Path('{looking}').touch()\nwhile True: pass", "endless.py"))
    pool.executor.submit(endless)
    pool.until(looking.exists, "the load of the file")
    pool.clock.passed_s += 30.0
    lost = pool.wait_end(endless)
    assert isinstance(lost, StepLost)
    assert lost.reason == f"the DAG file {endless.file} took longer than 30 s to load (dag_parse_timeout_s)"
    # The next worker runs a step that takes longer than that, because its file is loaded.
    waits = f"while not Path('{may_end}').exists():\n        time.sleep(0.01)"
    slow = author.step(f"def f(context):\n    Path('{begun}').touch()\n    {waits}\n    return 1")
    pool.until(pool.executor.room, "room for a step")
    pool.executor.submit(slow)
    pool.until(begun.exists, "the step's begin")
    pool.turn(0.0)  # that the file is loaded was said before
    pool.clock.passed_s += 30.0
    pool.turn(0.0)
    may_end.touch()
    assert pool.wait_end(slow) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))


def test_only_the_step_of_the_worker_that_died_is_lost(author: Author, make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    waits = author.step_of(
        author.write(
            """
            def f(context):
                folder = Path(__file__).parent
                os.mkfifo(folder / "fifo")
                (folder / "begun").touch()
                return (folder / "fifo").read_text()
            with DAG("d"):
                PythonOperator(task_id="t", python_callable=lambda: f(None))
            """,
            "waits.py",
        )
    )
    pool.executor.submit(waits)
    pool.until((author.folder / "begun").exists, "the step's begin")
    lost = pool.run(author.step("def f(context): os._exit(1)"))
    assert isinstance(lost, StepLost)
    (author.folder / "fifo").write_text("still here")
    assert pool.wait_end(waits) == StepSucceeded(xcoms=(XCom("return_value", b'"still here"'),))


def test_a_step_that_takes_too_much_memory_is_ended_and_the_limit_named(
    author: Author, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOK_INTERVAL_S", 0.1)
    pool = make_pool(memory_max_bytes=200 * 2**20)
    own = pool.run(author.step("def f(context):\n    held = bytearray(300 * 2**20)\n    wait_for_ever()"))
    child = pool.run(
        author.step(
            """
            def f(context):
                subprocess.run([sys.executable, "-c", "x = bytearray(300 * 2**20); import signal; signal.pause()"])
            """
        )
    )
    for lost in (own, child):
        assert isinstance(lost, StepLost)
        assert re.search(
            r"used \d+ MiB of memory with what .* the limit is 200 MiB \(worker_memory_max_mib\)", lost.reason
        )


def test_a_worker_that_has_grown_is_replaced_before_the_next_step_pays_for_it(
    author: Author, make_pool: MakePool
) -> None:
    pool = make_pool(memory_max_bytes=400 * 2**20)
    (pid,) = pool.executor.pids()
    assert pool.run(author.step("def f(context): sys.held = bytearray(300 * 2**20)")) == StepSucceeded()
    outcome = pool.run(author.step("def f(context): return os.getpid()"))
    assert isinstance(outcome, StepSucceeded)
    assert decode_value(outcome.xcoms[0].value) != pid


def test_a_worker_that_a_step_has_spoilt_is_replaced_and_gives_back_what_is_behind(
    author: Author, make_pool: MakePool, few_files: int
) -> None:
    pool = make_pool()
    (pid,) = pool.executor.pids()
    source = f"""
        def f(context):
            sys.left = [open(os.devnull) for _ in range({few_files} * 3 // 4)]
            return os.getpid()
        """
    leak, behind = author.step(source), author.step(source)
    pool.executor.submit(leak, 0.001)
    pool.executor.submit(behind, 0.001)
    ends = [pool.wait_end(leak), pool.wait_end(behind), pool.run(author.step(source))]
    assert ends[1] == StepReturned(behind.token)
    first, last = [decode_value(end.xcoms[0].value) for end in ends[::2]]
    assert first == pid != last


def test_workers_that_cannot_start_lose_what_waits_instead_of_keeping_it_for_ever(
    author: Author, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RESPAWN_WAIT_S", 0.01)

    spawned: list[ChildProcess] = []

    def spawn() -> ChildProcess:
        if len(spawned) == 3:
            raise OSError("no memory")
        spawned.append(start_worker(environment={"PYTHONHOME": "/nowhere"}))
        return spawned[-1]

    monkeypatch.setattr(worker_module, "RESPAWN_WAIT_MAX_S", 0.02)
    pool = make_pool(spawn=spawn, workers=2)
    step = author.step("def f(context): pass")
    pool.executor.submit(step)
    lost = pool.wait_end(step)
    assert isinstance(lost, StepLost)
    # Whichever of the two is the last of so many in a row.
    assert re.match(r"no worker can be started: (no memory|exited with code 1)", lost.reason), lost.reason
    assert pool.executor.room() == 0, "nobody knows whether a worker comes"


def test_what_a_process_logs_that_an_earlier_step_has_left_is_in_no_other_steps_log(author: Author, pool: Pool) -> None:
    forked = author.step(
        """
        def f(context):
            if os.fork() == 0:
                wait_for("next")
                print("left behind")
                os._exit(0)
        """
    )
    assert pool.run(forked) == StepSucceeded()
    later = author.step(
        """
        def f(context):
            Path(__file__).with_name("next").touch()
            wait_for("go")
        """
    )
    pool.executor.submit(later)
    pool.until(lambda: pool.logged("left behind"), "what was left has printed")
    (of,) = [step for step, record in pool.records if record["event"] == "left behind"]
    Path(later.file).with_name("go").touch()
    assert pool.wait_end(later) == StepSucceeded()
    assert of is None


def test_a_fork_that_comes_out_of_the_authors_code_does_not_speak_for_the_step(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        def f(context):
            print("before")
            pid = os.fork()
            if pid == 0:
                print("in the fork")
                raise ValueError("the fork's own")
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        """
    )
    assert pool.run(step) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))
    assert pool.lines() == ["before", "in the fork"]
    assert pool.logged("a fork of the step has failed")[0]["error"] == "ValueError: the fork's own"


def test_a_fork_of_a_step_cannot_send_a_query_and_says_so(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        from headgate.tasks import Variable

        def f(context):
            pid = os.fork()
            if pid == 0:
                try:
                    Variable.get("any")
                except Exception as error:
                    print(f"{type(error).__name__}: {error}")
                os._exit(0)
            return os.waitpid(pid, 0)[1]
        """
    )
    assert pool.run(step) == StepSucceeded(xcoms=(XCom("return_value", b"0"),))
    assert pool.asked() == []
    assert pool.lines() == ["QueryFailed: a fork of the step cannot send queries: send them before the fork"]


def test_processes_of_a_step_are_ended_as_any_other(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        def f(context):
            ready, ready_of_child = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(ready_of_child, b"x")
                wait_for_ever()
            os.read(ready, 1)
            os.kill(pid, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        """
    )
    assert pool.run(step) == StepSucceeded(xcoms=(XCom("return_value", b"-15"),))


@pytest.mark.parametrize("mark", [name for name, mark in TASK_MARKS.items() if mark.side == "worker"])
def test_a_worker_killed_at_any_mark_costs_its_step_or_has_told_its_outcome(
    author: Author, make_pool: MakePool, tmp_path: Path, mark: str
) -> None:
    deaths = MarkedDeaths(tmp_path / "deaths")
    environment = {**scrub(os.environ, passed=(), secrets=()), "PYTHONPATH": str(deaths.folder)}
    pool = make_pool(spawn=lambda: start_worker(environment=environment))
    (pid,) = pool.executor.pids()
    deaths.ask(mark)
    step = author.step("def f(context): print('printed'); return 1")
    end = pool.run(step)
    pool.until(lambda: pid not in pool.executor.pids(), "the death")
    assert deaths.has_died(mark)
    if mark == "worker.outcome_sent":
        assert end == StepSucceeded(xcoms=(XCom("return_value", b"1"),))
    else:
        assert isinstance(end, StepLost)
        assert end.reason.startswith("the worker process killed by SIGKILL")
    assert pool.lines() == ([] if mark == "worker.step_received" else ["printed"])
    assert pool.run(author.step("def f(context): return 2")) == StepSucceeded(xcoms=(XCom("return_value", b"2"),))
