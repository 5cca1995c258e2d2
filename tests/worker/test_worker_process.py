"""The worker as the process it is, and a scripted supervisor on its sockets: how it begins, leaves and is ended."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.processes import ends
from tests.waiting import WITHIN_S

from headgate.protocol.link.connection import Connection
from headgate.protocol.link.framing import encode_frame
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.link.worker_dialect import WorkerDialect
from headgate.protocol.messages.queries import EncodedValue, GetXCom, Response
from headgate.protocol.messages.runner import FRAME_BYTES_MAX, PROTOCOL_VERSION
from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSucceeded,
    XCom,
)
from headgate.protocol.messages.task_streams import Handled, StreamEvent, StreamOptions, StreamPart
from headgate.protocol.messages.worker import (
    ParseFile,
    RunStep,
    Step,
    StepEnded,
    StepLoaded,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)
from headgate.worker.process_state import ProcessState
from headgate.worker.session import EXIT_LEFT, EXIT_PROTOCOL, EXIT_STOPPED


class Worker:
    """A worker in a process of its own, and the supervisor's ends of its sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded = 0
        self.took_s = 0.0  # by the last step
        self.frames, frames = socket.socketpair()
        self.logs, logs = socket.socketpair()
        self.frames.settimeout(WITHIN_S)
        command = [sys.executable, "-P", "-m", "headgate.worker", "--frames-fd", str(frames.fileno())]
        command += ["--logs-fd", str(logs.fileno()), "--supervisor-pid", str(os.getpid())]
        with frames, logs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(frames.fileno(), logs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self.connection = Connection(WorkerDialect(), Role.SUPERVISOR)

    def say(self, message: Any) -> None:
        self.frames.sendall(self.connection.send(message))

    def hear(self) -> Any:
        """Return the next message, but those that say that a file is loaded: they are counted. Times are left out."""
        while True:
            while (message := self.connection.next_message()) is None:
                data = self.frames.recv(65536)
                if not data:
                    return None
                self.connection.receive_data(data)
            if isinstance(message, StepEnded):
                assert message.took_s > 0
                self.took_s = message.took_s
                return replace(message, took_s=0.0)
            if not isinstance(message, StepLoaded):
                return message
            self.loaded += 1

    def greet(self) -> None:
        assert self.hear() == WorkerHello(PROTOCOL_VERSION, self.process.pid, "0.1.0")
        self.say(WorkerWelcome(PROTOCOL_VERSION, WorkerSettings(import_paths=(str(self.folder),))))

    def write(self, source: str) -> str:
        path = self.folder / "dag.py"
        head = "import os, sys, threading\nfrom headgate.tasks import DAG, PythonOperator\n"
        tail = '\nwith DAG("d"):\n    PythonOperator(task_id="t", python_callable=f)\n'
        path.write_text(head + textwrap.dedent(source) + tail)
        return str(path)

    def exit_code(self) -> int:
        return self.process.wait(WITHIN_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.frames, self.logs, self.process.stdout):
            assert end is not None
            end.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.close()


def test_a_worker_leaves_when_its_link_is_closed(worker: Worker) -> None:
    worker.greet()
    worker.frames.shutdown(socket.SHUT_WR)
    assert worker.exit_code() == EXIT_LEFT


def test_a_step_whose_time_was_over_when_its_file_was_loaded_does_not_begin(worker: Worker, tmp_path: Path) -> None:
    file = worker.write(f"def f(): open({str(tmp_path / 'begun')!r}, 'w')")
    worker.greet()
    worker.say(RunStep(Step("a", 1, file, "d", "r", "t", 1, ends_at_s=0.001)))
    assert worker.hear() == StepEnded("a", StepFailed("its execution_timeout is over"))
    assert (worker.loaded, (tmp_path / "begun").exists()) == (0, False)
    worker.say(RunStep(Step("b", 1, file, "d", "r", "t", 1)))
    assert worker.hear() == StepEnded("b", StepSucceeded())
    assert (worker.loaded, (tmp_path / "begun").exists()) == (1, True)


def test_the_time_of_a_step_is_without_its_waits_for_values(worker: Worker) -> None:
    file = worker.write("def f(ti): ti.xcom_pull('other')")
    worker.greet()
    begun_at = time.monotonic()
    worker.say(RunStep(Step("a", 1, file, "d", "r", "t", 1)))
    asked = worker.hear()
    assert asked.query == GetXCom("other", "return_value")
    asked_at = time.monotonic()
    while time.monotonic() < asked_at + 2 * (asked_at - begun_at):  # longer than all that came before
        pass
    waited_s = time.monotonic() - asked_at
    worker.say(Response(asked.id, EncodedValue(None)))
    assert worker.hear() == StepEnded("a", StepSucceeded())
    assert worker.took_s <= time.monotonic() - begun_at - waited_s


def test_a_step_handles_the_part_of_its_stream_that_it_gets(worker: Worker) -> None:
    file = worker.folder / "pages.py"
    file.write_text(
        textwrap.dedent("""
        from headgate.tasks import DAG, BaseOperator
        from headgate.triggers.file import FileTrigger

        class Counts(BaseOperator):
            def execute(self, context):
                assert context["stream"] is None
                self.defer(trigger=FileTrigger("f"), stream=True, kwargs={"rows": 0})

            def handle_trigger_events(self, events, context, rows):
                assert context["stream"].handled == events[0].position
                for event in events:
                    rows += len(event.payload)
                    self.handled(event, rows=rows)

            def stream_ended(self, context, rows):
                return rows

        with DAG("d"):
            Counts(task_id="t")
    """)
    )
    worker.greet()
    given = Step("a", 1, str(file), "d", "r", "t", 1)

    def run(stream: StreamPart) -> StepOutcome:
        worker.say(RunStep(replace(given, next_method=deferred.next_method, next_kwargs=b'{"rows":0}', stream=stream)))
        ended: StepOutcome = worker.hear().outcome
        return ended

    worker.say(RunStep(given))
    deferred = worker.hear().outcome
    assert isinstance(deferred, StepDeferred)
    assert (deferred.next_method, deferred.stream) == ("handle_trigger_events", StreamOptions())
    pages = [StreamEvent(3 + number, "run", number, b"[1,2]", None, False, 1.0) for number in range(3)]
    assert run(StreamPart(0, 2, None, tuple(pages[:2]))) == StepHandled(Handled(4, 2, b'{"rows":4}'))
    broken = replace(pages[2], payload=b"5")
    failed = run(StreamPart(2, 2, b'{"rows":4}', (pages[2], broken)))
    assert isinstance(failed, StepFailed)
    assert failed.handled == Handled(5, 1, b'{"rows":6}')
    end = run(StreamPart(3, 0, b'{"rows":6}', is_over=True))
    assert end == StepSucceeded(xcoms=(XCom("return_value", b"6"),))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_an_idle_worker_that_is_ended_leaves(worker: Worker, number: int) -> None:
    worker.greet()
    worker.say(RunStep(Step("a", 1, worker.write("def f(): pass"), "d", "r", "t", 1)))
    assert worker.hear() == StepEnded("a", StepSucceeded())
    worker.process.send_signal(number)
    assert worker.exit_code() == EXIT_STOPPED


def test_a_ctrl_c_is_the_supervisors_affair(worker: Worker) -> None:
    worker.greet()
    worker.process.send_signal(signal.SIGINT)
    worker.say(RunStep(Step("a", 1, worker.write("def f(): pass"), "d", "r", "t", 1)))
    assert worker.hear() == StepEnded("a", StepSucceeded())


def test_a_thread_that_a_step_left_behind_does_not_keep_the_worker(worker: Worker) -> None:
    worker.greet()
    file = worker.write("def f(): threading.Thread(target=threading.Event().wait).start()")
    worker.say(RunStep(Step("a", 1, file, "d", "r", "t", 1)))
    assert worker.hear() == StepEnded("a", StepSucceeded())
    worker.frames.shutdown(socket.SHUT_WR)
    assert worker.exit_code() == EXIT_LEFT


SPOILT = """
    def f():
        import decimal, gc, resource, signal, socket, time
        os.environ["TZ"] = "Asia/Tokyo"
        time.tzset()
        decimal.getcontext().prec = 2
        gc.disable()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        sys.setrecursionlimit(500)
        socket.setdefaulttimeout(0.001)
"""
AS_NEW = """
    def f():
        import decimal, gc, resource, signal, socket, time
        of_signals = signal.pthread_sigmask(signal.SIG_BLOCK, []), str(signal.getsignal(signal.SIGALRM))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE), sys.getrecursionlimit(), socket.getdefaulttimeout()
        return repr((time.tzname, decimal.getcontext().prec, gc.isenabled(), of_signals, limits))
"""


def test_what_a_step_changes_in_the_process_is_undone(worker: Worker) -> None:
    worker.greet()
    outcomes = []
    for token, source in (("a", AS_NEW), ("b", SPOILT), ("c", AS_NEW)):
        worker.say(RunStep(Step(token, 1, worker.write(source), "d", "r", "t", 1)))
        outcomes.append(worker.hear())
    first, spoilt, last = outcomes
    assert spoilt == StepEnded("b", StepSucceeded())
    assert isinstance(first, StepEnded)
    assert last == replace(first, token="c")


def test_a_process_that_a_step_has_spoilt_runs_no_other_one(tmp_path: Path, few_files: int) -> None:
    worker = Worker(tmp_path)
    try:
        worker.greet()
        file = worker.write(f"def f(): os.left = [open(os.devnull) for _ in range({few_files} * 3 // 4)]")
        worker.say(RunStep(Step("a", 1, file, "d", "r", "t", 1)))
        worker.say(RunStep(Step("b", 1, file, "d", "r", "t", 1), is_behind=True))
        ended = worker.hear()
        assert isinstance(ended, StepEnded)
        assert str(ended.unfit).endswith(f"files are left open, and {few_files} may be")
        assert worker.hear() is None
        assert worker.exit_code() == EXIT_LEFT
    finally:
        worker.close()


def test_a_limit_that_cannot_be_raised_again_and_a_priority_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ProcessState()
    assert state.restore() is None

    def refuse(*_: object) -> None:
        raise PermissionError("not permitted")

    with monkeypatch.context() as lowered:
        lowered.setattr(resource, "getrlimit", lambda _: (20, 20))
        lowered.setattr(resource, "setrlimit", refuse)
        assert "cannot be raised to" in str(state.restore())
    with monkeypatch.context() as lowered:
        lowered.setattr(os, "getpriority", lambda *_: 19)
        lowered.setattr(os, "setpriority", refuse)
        assert "its priority cannot be" in str(state.restore())


@pytest.mark.parametrize(
    "frame",
    [
        lambda: encode_frame(b"\xc1", FRAME_BYTES_MAX),
        lambda: encode_frame(encode_message(WorkerWelcome(99, WorkerSettings())), FRAME_BYTES_MAX),
        lambda: encode_frame(encode_message(ParseFile("/early.py")), FRAME_BYTES_MAX),
    ],
)
def test_a_supervisor_that_breaks_the_protocol_is_left(worker: Worker, frame: Callable[[], bytes]) -> None:
    worker.hear()
    worker.frames.sendall(frame())
    assert worker.exit_code() == EXIT_PROTOCOL


def test_a_worker_dies_with_its_supervisor(tmp_path: Path) -> None:
    """I7: also while a step blocks it."""
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from tests.worker.test_worker_process import RunStep, Step, Worker
        worker = Worker(Path(sys.argv[1]))
        worker.greet()
        file = worker.write("def f(): os.write(1, b'begun'); threading.Event().wait()")
        worker.say(RunStep(Step("a", 1, file, "d", "r", "t", 1)))
        os.read(worker.process.stdout.fileno(), 5)
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), root]
    supervisor = subprocess.run(command, stdout=subprocess.PIPE, timeout=WITHIN_S, check=False)
    pid = int(supervisor.stdout)
    assert ends(pid, within_s=WITHIN_S), "the worker lives on"


# --- instances of mapped tasks -------------------------------------------------------------------

MAPPED = """
from headgate.tasks import DAG, task

with DAG("d"):
    @task
    def f(user): ...

    f.expand(user=[{"id": 7}, {"id": 8}, {}], map_index_name=lambda user: user["id"])
"""


def test_the_name_of_an_instance_comes_with_its_outcome(worker: Worker) -> None:
    file = worker.folder / "dag.py"
    file.write_text(MAPPED)
    worker.greet()
    for index, name in enumerate(("7", "8", None)):
        worker.say(RunStep(Step("a", 1, str(file), "d", "r", "f", 1, map_index=index)))
        assert worker.hear() == StepEnded("a", StepSucceeded(), name)
    assert b"map_index_name has failed: the instance has no name" in worker.logs.recv(65536)
