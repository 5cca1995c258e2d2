"""One session of a worker with its supervisor: the handshake, then steps and files one after the other."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import sys
import time
from typing import Final, assert_never

import msgspec
import structlog

from headgate.child.error_text import describe_error
from headgate.child.logs import STEP_FIELDS, Channel, configure, naming_process
from headgate.child.parent_death import SupervisorGone
from headgate.child.queries import queries_handled_by
from headgate.protocol import marks
from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.worker_dialect import FILE_PIECES_MAX
from headgate.protocol.messages.queries import VALUE_QUERIES, Query, QueryResult, Response
from headgate.protocol.messages.rules import Action
from headgate.protocol.messages.runner import PROTOCOL_VERSION
from headgate.protocol.messages.steps import StepFailed
from headgate.protocol.messages.worker import (
    DecideSignals,
    FileParsed,
    ParseFile,
    RecallSteps,
    RunStep,
    SignalsDecided,
    Step,
    StepEnded,
    StepLoaded,
    WorkerHello,
    WorkerWelcome,
)
from headgate.protocol.startup import without_collections
from headgate.protocol.version import VERSION
from headgate.tasks.parsing import DagFileRefused, parse_file
from headgate.worker import decisions, steps
from headgate.worker.link import BlockingLink
from headgate.worker.output import Output
from headgate.worker.process_state import ProcessState, UserModules
from headgate.worker.stops import StepStopped, Stops, place_of

log = structlog.get_logger(__name__)

EXIT_LEFT: Final = 0  # the supervisor closed the link, or knows that the process is unfit for another step
EXIT_PROTOCOL: Final = 76  # the supervisor broke the protocol
EXIT_STOPPED: Final = 78  # ended by a signal, with the step that ran
WARM_MODULES: Final = ("trio", "headgate.tasks.sensors", "httpx2", "headgate.tasks.http", "headgate.tasks.bash")
FILE_ENVELOPE_BYTES: Final = 64 * 1024  # of a frame, for the fields of `FileParsed` other than its DAGs


def run(sock: socket.socket, channel: Channel, stops: Stops) -> int:
    """Run one session over the socket; return the exit code of the process."""
    link = BlockingLink(sock, stops)
    try:
        with stops.interruptible():
            link.send(WorkerHello(PROTOCOL_VERSION, os.getpid(), VERSION))
            welcome = link.receive()
        assert isinstance(welcome, WorkerWelcome), "the session allows no other message"
        WorkerSession(link, welcome, channel, stops).run()
        return EXIT_LEFT
    except SupervisorGone:
        return EXIT_LEFT
    except RemoteProtocolError as error:
        log.error("the supervisor broke the protocol", error=str(error))
        return EXIT_PROTOCOL
    except StepStopped:
        pass
    return EXIT_STOPPED


class WorkerSession:
    """A session after its handshake."""

    def __init__(self, link: BlockingLink, welcome: WorkerWelcome, channel: Channel, stops: Stops) -> None:
        folders = welcome.settings.import_paths
        stops.hook_timeout_s = welcome.settings.hook_timeout_s
        self._pid = os.getpid()
        self._link = link
        self._waited_s = 0.0  # of the present step, for values
        self._unfit: str | None = None  # why the process can run no other step
        self._channel = channel
        self._stops = stops
        self._modules = UserModules(folders, others=sys.path)
        sys.path += [folder for folder in folders if folder not in sys.path]
        self._modules.install()
        self._output = Output(channel, stops)
        self._output.take()
        self._process_state = ProcessState()
        self._handlers = list(logging.getLogger().handlers)
        self._warm_up()
        # The modules loaded so far live as long as the process: the collector need not scan them again.
        gc.freeze()

    def _warm_up(self) -> None:
        """Import modules that many steps need, but not all, as long as no step waits."""
        with without_collections():
            for name in WARM_MODULES:
                if self._link.has_message:
                    return
                importlib.import_module(name)

    def run(self) -> None:
        """Run steps and parse files until the supervisor closes the link, or until a signal (`StepStopped`).

        Return after a step that has left the process unfit for others.
        """
        while True:
            with self._stops.interruptible():
                message = self._link.receive()
            match message:
                case RunStep():
                    if message.is_behind:
                        self._output.mark_step(message.step.token)
                    self._run_step(message.step)
                case ParseFile():
                    self._parse(message.file)
                case DecideSignals():
                    self._decide(message)
                case WorkerWelcome() | Response() | RecallSteps():
                    raise RemoteProtocolError(
                        f"expected RunStep, ParseFile or DecideSignals, got {type(message).__name__}"
                    )
                case _:
                    assert_never(message)
            if self._stops.is_asked:
                raise StepStopped
            if self._unfit is not None:
                return

    # --- steps ------------------------------------------------------------------------------------

    def _run_step(self, step: Step) -> None:
        marks.reach("worker.step_received")
        self._waited_s = 0.0
        begun_at = time.monotonic()
        with naming_process({name: getattr(step, name) for name in STEP_FIELDS}):
            ended = self._end_of(step)
            self._end_fork(ended)
            self._stops.wait_hook()
            self._settle()
        marks.reach("worker.step_done")
        if ended is not None and self._stops.is_asked and isinstance(ended.outcome, StepFailed):
            # The stop made the author's code fail, not the task; the supervisor, which stopped it, stores the reason.
            ended = None
        if ended is not None:
            took_s = max(0.0, time.monotonic() - begun_at - self._waited_s)
            self._send_end(step, msgspec.structs.replace(ended, took_s=took_s, unfit=self._unfit))
            marks.reach("worker.outcome_sent")
            if self._link.has_step:
                marks.reach("worker.bundle_step_done")

    def _end_of(self, step: Step) -> StepEnded | None:
        """Run the step; return how it has ended, or None if it was stopped."""
        self._refresh_modules(step.file)
        try:
            with queries_handled_by(self._ask), self._stops.interruptible():
                return steps.run(
                    step,
                    ask=self._ask,
                    killing=self._stops.killing,
                    on_loaded=lambda: self._link.send(StepLoaded(step.token)),
                )
        except StepStopped as stopped:
            if self._stops.is_by_user:  # as somebody wanted it: no error, but the author may ask where it hung
                log.info("the step was stopped", at=place_of(stopped, step.file))
            else:
                # With the traceback, which shows the author the line where it was stopped.
                log.warning("the step was stopped", exc_info=True)
            return None

    def _ask(self, query: Query) -> QueryResult:
        """Send a query of the step; what it waits for values is no work of its own.

        Else a supervisor that is busy would take short steps for long, give fewer of them at once, and be busier still.
        """
        begun_at = time.monotonic()
        try:
            return self._link.send_query(query)
        finally:
            if isinstance(query, VALUE_QUERIES):
                self._waited_s += time.monotonic() - begun_at

    def _end_fork(self, ended: StepEnded | None) -> None:
        """Exit if this is a fork of the step that returned from the author's code: its parent reports the outcome."""
        if os.getpid() == self._pid:
            return
        outcome = None if ended is None else ended.outcome
        if isinstance(outcome, StepFailed):
            log.error("a fork of the step has failed", error=outcome.error, traceback=outcome.traceback)
        self._output.end_step()
        os._exit(isinstance(outcome, StepFailed))

    def _send_end(self, step: Step, ended: StepEnded) -> None:
        try:
            self._link.send(ended)
        except LocalProtocolError as error:
            failure = StepFailed(f"the outcome of task {step.task_id!r} cannot be sent: {error}")
            self._link.send(StepEnded(step.token, failure, ended.map_name, ended.took_s, ended.unfit))

    # --- files ------------------------------------------------------------------------------------

    def _parse(self, file: str) -> None:
        with naming_process({"dag_file": file}):
            self._refresh_modules(file)
            parsed = self._parsed(file)
            self._settle()
        self._send_parsed(parsed)

    def _send_parsed(self, parsed: FileParsed) -> None:
        try:
            for piece in _pieces(parsed, self._link):
                self._link.send(piece)
        except (DagFileRefused, LocalProtocolError) as error:
            self._link.send(FileParsed(parsed.file, error=f"the DAGs of the file cannot be sent: {error}"))

    def _parsed(self, file: str) -> FileParsed:
        try:
            with self._stops.interruptible():
                parsed = parse_file(file)
        except StepStopped:
            raise
        except KeyboardInterrupt as error:  # raised by the author's code
            text, trace = describe_error(error)
            return FileParsed(file, error=text, traceback=trace)
        return FileParsed(file, parsed.dags, parsed.error, parsed.traceback, source_digest=parsed.source_digest)

    # --- signals ----------------------------------------------------------------------------------

    def _decide(self, asked: DecideSignals) -> None:
        def on_decided(action: Action) -> None:
            self._end_fork(None)
            marks.reach("worker.signal_decided")
            self._link.send(SignalsDecided(asked.token, (action,), more=True))

        with naming_process({name: getattr(asked, name) for name in STEP_FIELDS}):
            self._refresh_modules(asked.file)
            with self._stops.interruptible():
                last = decisions.run(asked, on_decided=on_decided)
            self._end_fork(None)
            self._settle()
        self._link.send(last)

    # --- all ---------------------------------------------------------------------------------------

    def _refresh_modules(self, file: str) -> None:
        """Make the DAG file import modules in their current versions, also from its own folder."""
        self._modules.add_folder(os.path.dirname(file))
        self._modules.refresh()

    def _settle(self) -> None:
        """Flush all output, and restore the state of the process."""
        self._output.end_step()
        if (unfit := self._process_state.restore()) is not None:
            log.warning("the process is unfit for another step, and is replaced", why=unfit)
            self._unfit = unfit
        self._stops.restore()
        root = logging.getLogger()
        if root.handlers != self._handlers or root.disabled or logging.root.manager.disable:
            logging.disable(logging.NOTSET)
            root.disabled = False
            configure(self._channel)
            self._handlers = list(root.handlers)


def _pieces(parsed: FileParsed, link: BlockingLink) -> list[FileParsed]:
    """Split the DAGs of a file into messages that each fit a frame; one DAG fits, unless the frame limit is very low.

    Raises `DagFileRefused` if more than `FILE_PIECES_MAX` messages are needed.
    """
    room = link.frame_bytes_max - FILE_ENVELOPE_BYTES
    pieces: list[FileParsed] = []
    taken = [0]
    size = 0
    for index, dag in enumerate(parsed.dags):
        needed = len(msgspec.msgpack.encode(dag))
        if size and size + needed > room:
            taken.append(index)
            size = 0
        size += needed
    if len(taken) > FILE_PIECES_MAX:
        raise DagFileRefused(
            f"its {len(parsed.dags):,} DAGs take {len(taken)} frames of {link.frame_bytes_max:,} bytes; "
            f"the limit is {FILE_PIECES_MAX}: spread them over several files"
        )
    for start, end in zip(taken, [*taken[1:], len(parsed.dags)], strict=True):
        pieces.append(msgspec.structs.replace(parsed, dags=parsed.dags[start:end], more=end < len(parsed.dags)))
    return pieces
