"""The runner as the process it is: a real child, a scripted supervisor on real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WITHIN_S

from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FinishedTrigger,
    FiredEvent,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import encode_value
from headgate.runner.forks import EXIT_FORK
from headgate.runner.session import EXIT_ABANDONED, EXIT_DRAINED, EXIT_OVERDUE, EXIT_PROTOCOL

TRIGGERS = '''
import logging
import multiprocessing
import os
import stat
import sys
import threading

import structlog
import trio

from headgate.triggers.base import BaseTrigger, TriggerEvent


class Chatty(BaseTrigger):
    """Logs in every way there is."""

    def __init__(self, n):
        structlog.get_logger("author").info("constructed")
        self.n = n

    def serialize(self):
        return "authored.Chatty", {"n": self.n}

    async def run(self):
        structlog.get_logger("author").info("structlog", value=object)
        logging.getLogger("library").info("%s", "stdlib")
        print("printed")
        yield TriggerEvent(self.n)
        await trio.sleep_forever()

    async def cleanup(self):
        structlog.get_logger("author").info("cleanup")


class Stuck(Chatty):
    """Does not end, and leaves a thread behind that does not end either."""

    async def run(self):
        threading.Thread(target=threading.Event().wait).start()
        yield TriggerEvent(self.n)
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


class Blocking(Chatty):
    """Blocks the loop for good."""

    async def run(self):
        threading.Event().wait()
        yield TriggerEvent(self.n)


class ForkGoesOn(Chatty):
    """Forks; both processes go on, the first one when its fork has ended."""

    async def run(self):
        pid = os.fork()
        if pid == 0:
            yield TriggerEvent("of the fork")
        else:
            _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
            yield TriggerEvent(os.waitstatus_to_exitcode(status))
        await trio.sleep_forever()


def sockets_among(descriptors):
    return [number for number in descriptors if stat.S_ISSOCK(os.fstat(number).st_mode)]


class ForkWorks(Chatty):
    """Has forks do work: from the loop, and from a thread."""

    async def run(self):
        options = dict(zip(sys.orig_argv[4::2], sys.orig_argv[5::2]))
        descriptors = [int(options["--frames-fd"]), int(options["--logs-fd"])]
        assert sockets_among(descriptors) == descriptors
        yield TriggerEvent(self.ask_fork(descriptors))
        yield TriggerEvent(await trio.to_thread.run_sync(self.ask_fork, descriptors))
        await trio.sleep_forever()

    def ask_fork(self, descriptors):
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        process = context.Process(target=lambda: answers.put(sockets_among(descriptors)))
        process.start()
        process.join()
        return [process.exitcode, answers.get()]
'''


class Runner:
    """A runner in a process of its own, and the supervisor's ends of its sockets."""

    def __init__(self, folder: Path, settings: RunnerSettings) -> None:
        self.settings = settings
        self.frames, frames = socket.socketpair()
        self.logs, logs = socket.socketpair()
        self.frames.settimeout(WITHIN_S)
        self.logs.settimeout(WITHIN_S)
        command = [sys.executable, "-P", "-m", "headgate.runner"]
        command += ["--frames-fd", str(frames.fileno()), "--logs-fd", str(logs.fileno())]
        command += ["--incarnation", "1", "--supervisor-pid", str(os.getpid())]
        with frames, logs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(frames.fileno(), logs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )
        self.connection = Connection(RunnerDialect(1), Role.SUPERVISOR)
        self.events: list[FiredEvent] = []
        self.finished: list[FinishedTrigger] = []

    def say(self, message: Any) -> None:
        self.frames.sendall(self.connection.send(message))

    def hear(self) -> Any:
        while (message := self.connection.next_message()) is None:
            data = self.frames.recv(65536)
            if not data:
                return None
            self.connection.receive_data(data)
        return message

    def greet(self) -> None:
        hello = self.hear()
        assert isinstance(hello, Hello)
        assert hello.pid == self.process.pid
        self.say(Welcome(PROTOCOL_VERSION, 1, self.settings))

    def start(self, classpath: str) -> None:
        kwargs = encode_value({"n": 5}, where="kwargs")
        self.say(StateSync(to_create=(TriggerSpec(1, "run-1", "orders", classpath, kwargs),)))

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answer rounds until the condition holds or the runner is gone."""
        while not until() and (message := self.hear()) is not None:
            assert isinstance(message, StateChanges)
            self.events += message.events
            self.finished += message.finished
            self.say(StateSync(message.round, tuple(event.seq for event in message.events if event.seq)))

    def records(self) -> list[dict[str, Any]]:
        """All log records; returns when the runner has ended."""
        with self.logs.makefile("rb") as file:
            return [json.loads(line) for line in file]

    def exit_code(self) -> int:
        return self.process.wait(WITHIN_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "authored.py").write_text(TRIGGERS)
    return tmp_path


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Runner]:
    runner = Runner(folder, RunnerSettings(import_paths=(str(folder),), heartbeat_s=1.0, **settings))
    try:
        yield runner
    finally:
        runner.process.kill()
        runner.process.wait(WITHIN_S)
        runner.frames.close()
        runner.logs.close()
        assert runner.process.stdout is not None
        runner.process.stdout.close()


def test_a_runner_runs_a_users_class_drains_and_exits_with_0(folder: Path) -> None:
    with running(folder) as runner:
        runner.greet()
        runner.start("authored.Chatty")
        runner.serve(until=lambda: bool(runner.events))
        runner.say(Drain(10.0))
        runner.serve()
        records = runner.records()
        assert runner.exit_code() == EXIT_DRAINED
        assert [event.payload for event in runner.events] == [b"5"]
        assert [(end.outcome, end.reason) for end in runner.finished] == [("cancelled", "shutdown")]
        names = {"trigger_id": 1, "trigger_name": "orders", "classpath": "authored.Chatty"}
        for event in ("constructed", "structlog", "stdlib", "printed", "cleanup"):
            (record,) = (record for record in records if record["event"] == event)
            assert record.items() >= names.items()
        assert runner.process.stdout is not None
        assert runner.process.stdout.read() == b""


def test_a_fork_that_returns_to_the_loop_is_ended_and_says_nothing_to_the_supervisor(folder: Path) -> None:
    with running(folder) as runner:
        runner.greet()
        runner.start("authored.ForkGoesOn")
        runner.serve(until=lambda: bool(runner.events))
        assert [event.payload for event in runner.events] == [str(EXIT_FORK).encode()]
        assert runner.process.stdout is not None
        said = json.loads(runner.process.stdout.readline())
        assert said["event"].startswith("a fork of the runner returned to its loop")
        assert (said["trigger_id"], said["trigger_name"]) == (1, "orders")
        runner.say(Drain(10.0))
        runner.serve()
        assert runner.exit_code() == EXIT_DRAINED


def test_forks_that_do_work_of_their_own_run_to_their_end_without_the_link(folder: Path) -> None:
    with running(folder) as runner:
        runner.greet()
        runner.start("authored.ForkWorks")
        runner.serve(until=lambda: len(runner.events) == 2)
        assert [event.payload for event in runner.events] == [b"[0,[]]", b"[0,[]]"]


def test_a_trigger_and_a_thread_that_do_not_end_are_left_behind_at_the_deadline(folder: Path) -> None:
    with running(folder) as runner:
        runner.greet()
        runner.start("authored.Stuck")
        runner.serve(until=lambda: bool(runner.events))
        runner.say(Drain(0.5))
        runner.serve()
        assert runner.exit_code() == EXIT_OVERDUE
        assert any(record["event"] == "the drain's deadline has passed" for record in runner.records())


def test_a_supervisor_that_closes_the_link_ends_the_runner(folder: Path) -> None:
    with running(folder) as runner:
        runner.greet()
        runner.start("authored.Stuck")
        runner.serve(until=lambda: bool(runner.events))
        runner.frames.close()
        assert runner.exit_code() == EXIT_ABANDONED
        assert any(record["event"] == "the supervisor is gone" for record in runner.records())


def test_a_supervisor_that_is_gone_before_the_handshake_ends_the_runner(folder: Path) -> None:
    with running(folder) as runner:
        runner.frames.close()
        assert runner.exit_code() == EXIT_ABANDONED


def test_a_supervisor_that_talks_nonsense_ends_the_runner_which_says_why(folder: Path) -> None:
    with running(folder) as runner:
        runner.frames.sendall(b"\x00\x00\x00\x01\xc1")
        assert runner.exit_code() == EXIT_PROTOCOL
        assert any(record["event"] == "the supervisor broke the protocol" for record in runner.records())


def test_a_blocked_runner_names_its_trigger_and_dumps_its_stacks_when_asked(folder: Path) -> None:
    with running(folder, blocked_after_s=0.1) as runner:
        runner.greet()
        runner.start("authored.Blocking")
        with runner.logs.makefile("rb") as file:
            report = next(record for line in file if "blocks the loop" in (record := json.loads(line))["event"])
        assert (report["trigger_id"], report["classpath"]) == (1, "authored.Blocking")
        assert "authored.py" in report["at"]
        assert report["line"] == "threading.Event().wait()"
        runner.process.send_signal(signal.SIGUSR1)  # by which the supervisor asks for the stacks
        assert runner.process.stdout is not None
        assert any(b"authored.py" in line for line in iter(runner.process.stdout.readline, b""))


def test_a_runner_whose_supervisor_has_another_pid_does_not_begin(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "headgate.runner", "--frames-fd", "0", "--logs-fd", "0"]
    command += ["--incarnation", "1", "--supervisor-pid", "1"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    assert b"the supervisor was gone before this process began" in done.stderr
