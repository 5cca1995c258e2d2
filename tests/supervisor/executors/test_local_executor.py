"""Steps on real worker processes: every outcome, everything printed, every way to die, every way to be ended."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.executors.workers_harness import Author, MakePool, Pool

from headgate.protocol.messages.queries import EncodedValue, GetXCom, Response
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepNotBegun, StepSkipped, StepSucceeded, XCom
from headgate.protocol.messages.worker import AssetEvent
from headgate.protocol.values import decode_value, encode_value
from headgate.supervisor.children import worker as worker_module
from headgate.supervisor.children.process import scrub, start_worker
from headgate.supervisor.executors import local, processes
from headgate.supervisor.executors.base import StepLost
from headgate.worker import steps
from headgate.worker.steps import find_task

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


def test_a_dag_or_task_that_was_there_a_moment_ago_is_named_and_costs_no_try(author: Author, pool: Pool) -> None:
    """The supervisor reads the file in a moment, and knows then that the task is gone."""
    step = author.step("def f(context): pass")
    os.utime(step.file, (1_000_000_000, 1_000_000_000))  # copied, with the time that it had elsewhere
    for fields, error in (
        ({"task_id": "gone"}, r"DAG 'd' of the file .*, as it is here, has no task 'gone'; it has 't'"),
        ({"dag_id": "gone"}, r", as it is here, has no DAG 'gone'; it has 'd'"),
    ):
        outcome = pool.run(author.step_of(Path(step.file), **fields))
        assert isinstance(outcome, StepNotBegun)
        assert re.search(error, outcome.reason), outcome.reason


@pytest.mark.parametrize("names", [("d", "gone"), ("gone", "t")])
def test_a_dag_or_task_that_its_file_has_had_no_more_for_a_while_fails(
    author: Author, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    step = author.step("def f(context): pass")
    assert isinstance(find_task(step.file, *names), StepNotBegun)
    monkeypatch.setattr(steps, "CHANGED_LATELY_S", -1.0)
    assert isinstance(find_task(step.file, *names), StepFailed)


@pytest.mark.parametrize("content", ["open('nothing')", "def f(:", "from helper import nothing", "import helper"])
def test_a_file_that_was_just_saved_with_an_error_costs_no_try(
    author: Author, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    """Within a minute its author mends it; after that each step of it fails."""
    step = author.step("def f(context): pass")
    (tmp_path / "helper.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    Path(step.file).write_text(content)
    assert isinstance(find_task(step.file, "d", "t"), StepNotBegun)
    monkeypatch.setattr(steps, "CHANGED_LATELY_S", -1.0)
    outcome = find_task(step.file, "d", "t")
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith(f"the DAG file {step.file} cannot be loaded: ")
    assert outcome.traceback


@pytest.mark.parametrize("content", ["1 / 0", "def f(:", ""])
def test_nor_does_a_module_that_was_just_saved_with_an_error(
    author: Author, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    step = author.step("def f(context): pass")
    Path(step.file).write_text("from helper import nothing")
    (tmp_path / "helper.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    for name, kind in (("helper.py", StepNotBegun), ("other.py", StepFailed)):
        monkeypatch.setattr(steps, "_was_just_changed", lambda file, name=name: Path(file).name == name)
        assert isinstance(find_task(step.file, "d", "t"), kind)


def test_a_step_whose_file_is_not_there_has_not_begun(author: Author, pool: Pool, tmp_path: Path) -> None:
    outcome = pool.run(author.step_of(tmp_path / "no.py"))
    assert outcome == StepNotBegun(f"the DAG file {tmp_path / 'no.py'} is not there")
    assert isinstance(pool.run(author.step("def f(context): pass")), StepSucceeded)


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
    # Standard output and error, a copy for where a step begins, and the pipe by which a worker hears of its signals.
    assert kinds == ["/dev/null", "pipe", "pipe", "pipe", "pipe", "pipe", "socket", "socket"]
    assert not [name for name in names if name.startswith("HEADGATE_")]


def test_a_stopped_worker_is_told_in_the_log(
    author: Author, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "LOOK_INTERVAL_S", 0.05)
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
