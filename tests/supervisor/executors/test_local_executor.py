"""Steps on real worker processes: every outcome, everything printed, every way to die, every way to be ended."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.executors.workers_harness import Author, Pool, closing

from headgate.protocol.marks import TASK_MARKS
from headgate.protocol.messages.queries import EncodedValue, GetXCom, Response
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepSkipped, StepSucceeded, XCom
from headgate.protocol.messages.worker import AssetEvent
from headgate.protocol.values import decode_value, encode_value
from headgate.supervisor.children import worker as worker_module
from headgate.supervisor.children.process import ChildProcess, scrub, start_worker
from headgate.supervisor.executors import local
from headgate.supervisor.executors.base import EndReason, StepLost
from headgate.testing.crash.killing import MarkedDeaths

MakePool = Callable[..., Pool]


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Pool(tmp_path, **options)))


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool()


# --- outcomes ------------------------------------------------------------------------------------


def test_a_step_that_returns_has_succeeded_with_its_value(author: Author, pool: Pool) -> None:
    outcome = pool.run(author.step("def f(context): return {'params': context['params']}", params=b'{"a":1}'))
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b'{"params":{"a":1}}'),))


def test_a_step_that_raises_has_failed_with_its_traceback(author: Author, pool: Pool) -> None:
    outcome = pool.run(author.step("def f(context): return 1 / 0"))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "def f(context): return 1 / 0" in outcome.traceback
    assert outcome.may_retry


def test_a_step_may_skip_itself_or_give_up_for_good(author: Author, pool: Pool) -> None:
    assert pool.run(author.step("def f(context): raise TaskSkipped('no rows')")) == StepSkipped(reason="no rows")
    failed = pool.run(author.step("def f(context): raise TaskFailed('never')"))
    assert isinstance(failed, StepFailed)
    assert not failed.may_retry


def test_a_step_defers_from_any_depth_and_goes_on_where_it_said(author: Author, pool: Pool) -> None:
    file = author.write(
        """
        def deep(depth):
            if depth:
                deep(depth - 1)
            raise TaskDeferred(
                trigger=TimeDeltaTrigger(timedelta(seconds=5)), method_name="done", kwargs={"n": 3},
                timeout=timedelta(minutes=1),
            )

        class Waits(BaseOperator):
            def execute(self, context):
                deep(20)

            def done(self, context, event, n):
                return [event, n, context["try_number"]]

        with DAG("d"):
            Waits(task_id="t")
        """
    )
    outcome = pool.run(author.step_of(file))
    assert isinstance(outcome, StepDeferred)
    assert (outcome.next_method, outcome.next_kwargs, outcome.timeout_s) == ("done", b'{"n":3}', 60.0)
    assert outcome.classpath == "headgate.triggers.temporal.DateTimeTrigger"
    resumed = author.step_of(
        file, next_method=outcome.next_method, next_kwargs=outcome.next_kwargs, event=b'"fired"', try_number=2
    )
    assert pool.run(resumed) == StepSucceeded(xcoms=(XCom("return_value", b'["fired",3,2]'),))
    failed = pool.run(author.step_of(file, next_method="__fail__", next_kwargs=b'{"error":"no"}'))
    assert isinstance(failed, StepFailed)
    assert failed.error == "TaskDeferralError: no"


def test_the_context_says_what_the_run_is_for(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        def f(context):
            names = ["logical_date", "data_interval_start", "data_interval_end", "run_id"]
            return [str(context[name]) for name in names], [list(event) for event in context["asset_events"]]
        """,
        logical_date_s=86_400.0,
        data_interval_s=(0.0, 86_400.0),
        asset_events=(AssetEvent("s3://a", b'{"n":1}', 3600.0),),
    )
    outcome = pool.run(step)
    assert isinstance(outcome, StepSucceeded)
    texts, events = decode_value(outcome.xcoms[0].value)
    assert texts == ["1970-01-02 00:00:00+00:00", "1970-01-01 00:00:00+00:00", "1970-01-02 00:00:00+00:00", "r"]
    assert [(asset, payload, moment.timestamp()) for asset, payload, moment in events] == [("s3://a", {"n": 1}, 3600.0)]


def test_a_file_dag_or_task_that_is_gone_is_named(author: Author, pool: Pool, tmp_path: Path) -> None:
    step = author.step("def f(context): pass")
    for fields, error in (
        ({"task_id": "gone"}, r"DAG 'd' no longer has the task 'gone'; it has 't'"),
        ({"dag_id": "gone"}, r"no longer has the DAG 'gone'; it has 'd'"),
        ({"file": str(tmp_path / "no.py")}, r"no\.py cannot be loaded: FileNotFoundError"),
    ):
        outcome = pool.run(author.step_of(Path(step.file), **fields))
        assert isinstance(outcome, StepFailed)
        assert re.search(error, outcome.error), outcome.error


def test_an_interrupt_or_an_exit_of_the_authors_own_is_a_failure(author: Author, pool: Pool) -> None:
    for raised in ("KeyboardInterrupt('mine')", "SystemExit(0)", "BaseException('mine')"):
        outcome = pool.run(author.step(f"def f(context): raise {raised}"))
        assert isinstance(outcome, StepFailed)
        assert raised.partition("(")[0] in outcome.error
    assert pool.spawned <= 1


def test_params_that_are_no_dict_are_a_failure(author: Author, pool: Pool) -> None:
    outcome = pool.run(author.step("def f(context): pass", params=b"[1]"))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "DAG 'd', task 't': ValueError: the params of run 'r' are a list, not a dict"


def test_a_step_asks_and_waits_for_its_answer(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): return context['ti'].xcom_pull('other', 'k')")
    pool.executor.submit(step)
    pool.until(pool.asked, "the query")
    (asked,) = pool.asked()
    assert (asked.token, asked.query) == (step.token, GetXCom("other", "k"))
    pool.executor.answer(step.token, Response(asked.id, EncodedValue(b"[1,2]")))
    assert pool.wait_end(step) == StepSucceeded(xcoms=(XCom("return_value", b"[1,2]"),))
    pool.executor.answer(step.token, Response(asked.id, EncodedValue(None)))  # too late: nobody's


def test_what_cannot_be_answered_says_why(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): return context['ti'].xcom_pull('other')")
    pool.executor.submit(step)
    pool.until(pool.asked, "the query")
    pool.executor.answer(step.token, Response(pool.asked()[0].id, error="the database is away"))
    outcome = pool.wait_end(step)
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "QueryFailed: the database is away"


def test_a_step_too_long_for_a_frame_is_lost_with_the_reason_and_the_worker_goes_on(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): pass", params=b'"' + b"x" * (17 * 2**20) + b'"')
    lost = pool.run(step)
    assert isinstance(lost, StepLost)
    assert "RunStep needs a frame of" in lost.reason
    assert pool.run(author.step("def f(context): pass")) == StepSucceeded()


# --- what is printed -----------------------------------------------------------------------------


def test_every_record_of_a_step_says_whose_it_is(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        def f(context):
            print("printed")
            print("to stderr", file=sys.stderr)
            logging.getLogger("lib").info("%s", "stdlib")
            structlog.get_logger("author").info("structured", value=1)
            thread = threading.Thread(target=lambda: print("from a thread"))
            thread.start()
            thread.join()
            os.write(1, b"past Python\\n")
            subprocess.run(["echo", "of a child"])
        """
    )
    assert pool.run(step) == StepSucceeded()
    names = {"dag_id": "d", "run_id": "r", "task_id": "t", "try_number": 1, "task_instance_id": step.task_instance_id}
    for event in ("printed", "to stderr", "stdlib", "structured", "from a thread"):
        (record,) = pool.logged(event)
        assert record.items() >= names.items()
    assert {owner for owner, _ in pool.records} == {step}
    assert pool.output == [(step, "past Python"), (step, "of a child")]


def test_bytes_that_are_no_text_are_kept_as_escapes(author: Author, pool: Pool) -> None:
    pool.run(
        author.step(
            """
            def f(context):
                sys.stdout.buffer.write(b"\\xff\\x00 binary \\xfe\\n")
                print("lone \\udc80 surrogate, no line end", end="")
            """
        )
    )
    assert pool.lines() == ["\\xff\x00 binary \\xfe", "lone \\udc80 surrogate, no line end"]


def test_a_line_of_5_mb_comes_whole_in_pieces(author: Author, pool: Pool) -> None:
    outcome = pool.run(author.step("def f(context): print('é' * (5 * 2**20 // 2)); print('after')"))
    assert outcome == StepSucceeded()
    pieces = [record for _, record in pool.records if record["logger"] == "stdout"]
    assert "".join(piece["event"] for piece in pieces[:-1]) == "é" * (5 * 2**20 // 2)
    assert [piece.get("more", False) for piece in pieces] == [True] * (len(pieces) - 2) + [False, False]
    assert not any("cut" in json.dumps(piece) for piece in pieces)


def test_what_fills_every_buffer_is_not_lost(author: Author, pool: Pool) -> None:
    step = author.step(
        """
        def f(context):
            for n in range(50_000):
                print(n)
            os.write(1, b"".join(b"%d\\n" % n for n in range(5000)))
        """
    )
    assert pool.run(step) == StepSucceeded()
    assert pool.lines() == [str(n) for n in range(50_000)]
    assert [line for _, line in pool.output] == [str(n) for n in range(5000)]


def test_a_step_may_close_its_streams_and_the_next_one_prints(author: Author, pool: Pool) -> None:
    pool.run(author.step("def f(context): print('one'); sys.stdout.close(); sys.stderr = None; logging.disable(50)"))
    outcome = pool.run(author.step("def f(context): print('two'); logging.getLogger('x').info('heard')"))
    assert outcome == StepSucceeded()
    assert pool.lines() == ["one", "two"]
    assert pool.logged("heard")
    assert pool.spawned <= 1


def test_what_a_step_changes_of_the_process_is_put_back(author: Author, pool: Pool) -> None:
    pool.run(
        author.step(
            """
            def f(context):
                os.environ["LEFT"] = "x"
                os.chdir("/")
                sys.path.insert(0, "/left")
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.umask(0o777)
            """
        )
    )
    look = """
        def f(context):
            handler = signal.getsignal(signal.SIGTERM)
            return [os.environ.get("LEFT"), os.getcwd(), "/left" in sys.path, handler == signal.SIG_IGN, os.umask(0o22)]
    """
    outcome = pool.run(author.step(look))
    assert isinstance(outcome, StepSucceeded)
    left = decode_value(outcome.xcoms[0].value)
    assert left[:4] == [None, os.getcwd(), False, False]
    assert left[4] != 0o777


# --- code that changes ---------------------------------------------------------------------------


def test_a_step_sees_the_code_that_is_on_the_disk_when_it_begins(author: Author, pool: Pool) -> None:
    """Also when a file changes within a second to a source of the same length."""
    package = author.folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (author.folder / "outer.py").write_text("from pack.inner import VALUE")
    for value in (b"1", b"2", b"3"):
        (package / "inner.py").write_text(f"VALUE = {value.decode()}")
        outcome = pool.run(author.step("import outer\ndef f(context): return outer.VALUE"))
        assert outcome == StepSucceeded(xcoms=(XCom("return_value", value),))
    (author.folder / "fresh.py").write_text("VALUE = 4")
    outcome = pool.run(author.step("import fresh\ndef f(context): return fresh.VALUE"))
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b"4"),))
    assert pool.spawned <= 1


def test_modules_that_are_not_the_authors_stay_as_they_are(author: Author, pool: Pool) -> None:
    source = "import helper, json\ndef f(context):\n    json.mark = getattr(json, 'mark', 0) + 1\n    return json.mark"
    for value in (b"1", b"2"):
        (author.folder / "helper.py").write_text(f"VALUE = {value.decode()}")
        assert pool.run(author.step(source)) == StepSucceeded(xcoms=(XCom("return_value", value),))


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
    monkeypatch.setattr(local, "LOOK_INTERVAL_S", 0.1)
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
        assert re.search(r"used \d+ MiB of memory; the limit is 200 MiB \(worker_memory_max_mib\)", lost.reason)


def test_a_worker_that_has_grown_is_replaced_before_the_next_step_pays_for_it(
    author: Author, make_pool: MakePool
) -> None:
    pool = make_pool(memory_max_bytes=400 * 2**20)
    (pid,) = pool.executor.pids()
    assert pool.run(author.step("def f(context): sys.held = bytearray(300 * 2**20)")) == StepSucceeded()
    outcome = pool.run(author.step("def f(context): return os.getpid()"))
    assert isinstance(outcome, StepSucceeded)
    assert decode_value(outcome.xcoms[0].value) != pid


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
    assert pool.logged("the step was stopped")[0]["exception"].count("wait_for_ever")


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
    assert is_gone(int(pid_file.read_text()))


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
    assert is_gone(int(pid_file.read_text()))


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


def test_a_step_that_no_worker_has_begun_is_ended_at_once(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): (Path(__file__).parent / 'begun').touch()")
    pool.executor.submit(step)
    pool.executor.end(step.token, "user", "cancelled")
    assert pool.wait_end(step) == StepLost(step.token, "cancelled")
    assert pool.run(author.step("def f(context): return 1")) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))
    assert not (author.folder / "begun").exists()


# --- the pool ------------------------------------------------------------------------------------


def test_a_step_is_not_given_to_a_worker_that_has_died_unseen(author: Author, pool: Pool) -> None:
    assert pool.run(author.step("def f(context): return 1")) == StepSucceeded(xcoms=(XCom("return_value", b"1"),))
    (pid,) = pool.executor.pids()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    step = author.step("def f(context): return 2")
    pool.executor.submit(step)
    assert pool.wait_end(step) == StepSucceeded(xcoms=(XCom("return_value", b"2"),))


def test_200_steps_through_a_pool_of_two(author: Author, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WORKER_STEPS_MAX", 60)
    pool = make_pool(workers=2)
    file = Path(author.step("def f(context): print(context['run_id']); return context['run_id']").file)
    waiting = [author.step_of(file, run_id=f"run-{n}") for n in range(200)]
    steps = list(waiting)

    def go_on() -> bool:
        while waiting and pool.executor.room():
            pool.executor.submit(waiting.pop())
        assert len(pool.executor.pids()) <= 2
        return all(pool.ended(step.token) for step in steps)

    pool.until(go_on, "200 steps")
    for step in steps:
        value = encode_value(step.run_id, where="run_id")
        assert pool.wait_end(step) == StepSucceeded(xcoms=(XCom("return_value", value),))
    assert {(owner.run_id, record["run_id"], record["event"]) for owner, record in pool.records} == {
        (step.run_id, step.run_id, step.run_id) for step in steps
    }
    assert pool.spawned > 2, "workers are replaced"


def test_a_worker_is_warm_before_it_is_needed(author: Author, make_pool: MakePool) -> None:
    pool = make_pool(workers=3)
    assert (len(pool.executor.pids()), pool.executor.room()) == (1, 3)
    file = author.write(
        """
        with DAG("d"):
            PythonOperator(task_id="t", python_callable=wait_for_ever)
        """
    )
    for busy in (1, 2, 3):
        pool.executor.submit(author.step_of(file))
        assert len(pool.executor.pids()) == min(3, busy + 1)
        assert pool.executor.room() == 3 - busy


def test_a_pool_that_drains_takes_nothing_and_ends_what_runs(author: Author, pool: Pool) -> None:
    step = author.step("def f(context): return 1")
    pool.executor.submit(step)
    assert not pool.executor.drain(0.0)
    assert pool.executor.room() == 0
    assert isinstance(pool.wait_end(step), StepSucceeded)
    assert pool.executor.drain(0.0)
    (pid,) = pool.executor.pids()
    pool.executor.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_has_no_database_and_no_key(author: Author, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12: of the supervisor's it has its two sockets and the pipe; and nothing of the environment that is secret."""
    outcome = pool.run(
        author.step(
            """
            def f(context):
                own = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                kinds = sorted(os.readlink(fd).partition(":")[0] for fd in own if os.path.exists(fd))
                return kinds, sorted(os.environ)
            """
        )
    )
    assert isinstance(outcome, StepSucceeded)
    kinds, names = decode_value(outcome.xcoms[0].value)
    # Standard output and error, and the pipe by which a worker hears of its signals.
    assert kinds == ["/dev/null", "pipe", "pipe", "pipe", "pipe", "socket", "socket"]
    assert not [name for name in names if name.startswith("HEADGATE_")]


def test_a_stopped_worker_is_told_in_the_log(
    author: Author, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(local, "STOPPED_S", 0.1)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(local.log, "warning", lambda event, **fields: told.append({"event": event, **fields}))
    pool = make_pool()
    step = author.step("def f(context): (Path(__file__).parent / 'begun').touch(); wait_for_ever()")
    pool.executor.submit(step)
    pool.until((author.folder / "begun").exists, "the step's begin")
    (pid,) = [pid for pid in pool.executor.pids() if pool.executor._members[pid].step == step]
    os.kill(pid, signal.SIGSTOP)
    pool.until(lambda: told, "the warning")
    assert told == [
        {"event": "a worker is stopped (SIGSTOP), and its step with it", "pid": pid}
        | {"dag_id": "d", "task_id": "t", "run_id": "r"}
    ]


def test_workers_that_die_before_their_first_step_come_ever_more_slowly(
    tmp_path: Path, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have said hello, and still nothing can be run: a module of the user's is in the place of one of ours."""
    (tmp_path / "httpx2.py").write_text("raise SystemExit(3)")
    waits: list[float] = []
    monkeypatch.setattr(local.log, "warning", lambda event, **fields: waits.append(fields["next_in_s"]))
    environment = {**scrub(os.environ, passed=(), secrets=()), "PYTHONPATH": str(tmp_path)}
    pool = make_pool(spawn=lambda: start_worker(environment=environment), workers=4)
    pool.until(lambda: len(waits) == 3, "three deaths")
    assert worker_module.RESPAWN_WAIT_S <= waits[0] < waits[1] < waits[2]
    assert pool.executor.room() == 0
