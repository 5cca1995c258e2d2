"""A child process on the selector of the supervisor's loop; its owner receives its messages, its output and its end."""

from __future__ import annotations

import selectors
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from headgate.protocol.errors import RemoteProtocolError
from headgate.supervisor.children.link import Link, Received, Sent
from headgate.supervisor.children.process import ChildProcess, LineReader

FINAL_READS_MAX = 1024  # reads to empty the socket of a child that is gone

_decode_record = msgspec.json.Decoder(dict[str, Any]).decode

Received_contra = TypeVar("Received_contra", contravariant=True)


class ChildOwner(Protocol[Received_contra]):
    """Handles the messages, the output and the end of children; called in the supervisor's loop."""

    def child_said(self, pid: int, message: Received_contra) -> None:
        """Handle a message. `RemoteProtocolError` says that the child must not have sent it."""
        ...

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Handle a log record."""
        ...

    def child_printed(self, pid: int, line: str) -> None:
        """Handle a line of output, or a log record that is not JSON. It holds no secrets."""
        ...

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Decide on a child that broke the protocol, or that reads nothing; nothing more is read from its link."""
        ...

    def child_ended(self, pid: int, explanation: str) -> None:
        """Handle the end of a child that is reaped; all it said was handled before.

        ``explanation`` continues "the process ...".
        """
        ...


class WatchedChild(Generic[Sent, Received]):
    """A child process whose descriptors are registered with a selector until it has ended."""

    def __init__(
        self,
        process: ChildProcess,
        link: Link[Sent, Received],
        selector: selectors.BaseSelector,
        owner: ChildOwner[Received],
    ) -> None:
        self.process = process
        self.pid = process.pid
        self.link = link
        self.is_ended = False
        self._owner = owner
        self._selector = selector
        self._events = selectors.EVENT_READ
        selector.register(link, self._events, self._on_frames)
        selector.register(process.output, selectors.EVENT_READ, self._on_output)
        selector.register(process.records, selectors.EVENT_READ, self._on_records)
        selector.register(process.pidfd, selectors.EVENT_READ, self._on_end)

    # --- called by its owner ----------------------------------------------------------------------

    def send(self, message: Sent) -> None:
        """Send a message. Raises `LocalProtocolError` if it cannot be sent."""
        try:
            self.link.send(message)
        except RemoteProtocolError as error:
            self._owner.child_broke_protocol(self.pid, error)
        self._watch_writing()

    def read_empty(self) -> None:
        """Handle all that it has printed and logged by now."""
        for source, handle in ((self.process.output, self._print), (self.process.records, self._log)):
            if not source.is_ended:
                for line in source.read_empty():
                    handle(line)
                self._unregister_ended(source)

    def destroy(self) -> None:
        """Kill it and leave nothing of it behind; the owner does not hear of it again."""
        if not self.is_ended:
            self._unregister()
            self.process.kill("the supervisor leaves")
            self._reap()

    # --- called by the selector -------------------------------------------------------------------

    def _on_frames(self) -> None:
        if self.link.is_ended:
            return
        self.link.flush()
        try:
            for message in self.link.receive():
                self._handle_message(message)
            error = self.link.error
        except RemoteProtocolError as exc:  # the owner's opinion of a message
            error = exc
        if error is not None and not self.link.is_ended:
            self.link.is_ended = True
            self._owner.child_broke_protocol(self.pid, error)
        if self.link.is_ended:
            self._selector.unregister(self.link)
            self._handle_closed_link()
        else:
            self._watch_writing()

    def _on_output(self) -> None:
        if not self.process.output.is_ended:
            for line in self.process.output.read():
                self._print(line)
            self._unregister_ended(self.process.output)

    def _on_records(self) -> None:
        if not self.process.records.is_ended:
            for line in self.process.records.read():
                self._log(line)
            self._unregister_ended(self.process.records)

    def _on_end(self) -> None:
        """The process is gone: handle the rest of its messages and output, then tell its owner."""
        if self.is_ended:
            return
        self.is_ended = True
        for _ in range(FINAL_READS_MAX):
            if self.link.is_ended:
                break
            self._on_frames()
        self.read_empty()
        self._unregister()
        self._owner.child_ended(self.pid, self._reap())

    # --- for subclasses ---------------------------------------------------------------------------

    def _handle_message(self, message: Received) -> None:
        self._owner.child_said(self.pid, message)

    def _handle_closed_link(self) -> None:
        """The child has closed its end of the link, or broken the protocol."""

    # --- inside -----------------------------------------------------------------------------------

    def _print(self, line: bytes) -> None:
        self._owner.child_printed(self.pid, self.process.note_output(line))

    def _log(self, line: bytes) -> None:
        try:
            record = _decode_record(line)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, as is bad UTF-8
            self._print(line)
        else:
            self._owner.child_logged(self.pid, record)

    def _watch_writing(self) -> None:
        """Wake for writing while something is unsent."""
        if self.link.is_ended:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.link.has_unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self.link, events, self._on_frames)

    def _unregister_ended(self, source: LineReader) -> None:
        if source.is_ended:
            self._selector.unregister(source)

    def _unregister(self) -> None:
        self.is_ended = True
        for source in (self.link, self.process.output, self.process.records):
            if not source.is_ended:
                self._selector.unregister(source)
        self._selector.unregister(self.process.pidfd)

    def _reap(self) -> str:
        explanation = self.process.reap()
        self.link.close()
        self.process.close()
        return explanation
