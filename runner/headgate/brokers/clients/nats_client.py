"""Connections to NATS from stored ones, driven by a thread: an event loop of its own, which runs only inside a call.

``nats://login:password@host:4222``, and ``tls://`` for TLS; a login without a password is a token. In the query:
``creds`` and ``nkey`` (paths of files of credentials), and the options of `headgate.brokers.clients.connecting`.
Several hosts are tried in order.

The client library makes no connection anew by itself: the producer does, and knows what that means for what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.bodies import joined
from headgate.brokers.clients.connecting import ask_for_refusal, certificate_error, check_connection, tls_context
from headgate.triggers.named_values import Connection

try:
    from nats.aio.client import Client as NATS
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.errors import NoServersError
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("NATS needs the client nats-py: pip install 'headgate[nats]'", name="nats") from missing

SCHEMES: Final = {"nats": False, "tls": True}
FILES: Final = ("creds", "nkey")
PORT: Final = 4222
CONNECT_TIMEOUT_S: Final = 5
REQUEST_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 1.0
PING_INTERVAL_S: Final = 5  # a server that misses two of them is left
# The header with what is wrong with a message beside its body. No header that comes has a space in its name.
UNREADABLE: Final = "not readable"
SHOWN_BYTES_MAX: Final = 200  # of what is wrong
TROUBLE: Final = (NatsError, OSError, asyncio.TimeoutError)
_PERMISSION: Final = "permissions violation"
_REFUSALS: Final = ("authorization violation", "authentication", "user credentials", _PERMISSION)

Result = TypeVar("Result")


class NatsLost(ConnectionError):
    """The connection is closed, or a question has no answer; among `TROUBLE`."""


class ApiError(Exception):
    """JetStream refuses a question; ``code`` is that of HTTP."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code


class _Client(NATS):
    """The library's client. What a publisher has made unreadable ends no reading, which goes on for other messages.

    There it raises in the loop that reads; that ends with a line in the log, and the message comes again, for ever.
    """

    async def _process_headers(self, headers: Any) -> Any:
        try:
            return read_headers(headers) if headers else None
        except ValueError:
            return {UNREADABLE: f"the headers {headers[:SHOWN_BYTES_MAX]!r} cannot be read"}

    def _build_message(self, *given: Any, **named: Any) -> Any:
        try:
            return super()._build_message(*given, **named)
        except UnicodeDecodeError:
            sid, subject, reply, data, headers = given
            subject, reply = (text.decode(errors="backslashreplace") for text in (subject, reply))
            headers = {**(headers or {}), UNREADABLE: f"the subject {subject[:SHOWN_BYTES_MAX]} is not UTF-8"}
            return super()._build_message(sid, subject.encode(), reply.encode(), data, headers)

    async def _read_loop(self) -> None:
        await super()._read_loop()
        if self.is_connected:  # an error has ended it, and is only in the log
            error = NatsLost("the client library has stopped reading, and has logged why")
            await self._error_cb(error)
            await self._process_op_err(error)


class NatsClient:
    """One connection. Every method but `close` raises what `TROUBLE` names; none is called by two threads."""

    def __init__(self, connection: Connection, name: str) -> None:
        """Connect to the first host that answers. Raises `BrokerMisconfigured` and what `TROUBLE` names."""
        options = _options(connection)
        self.name = name
        self.arrived: deque[Msg] = deque()
        self._last_error: BaseException | None = None
        self._news, self._answered, self._broken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        failure: BaseException | None = None
        try:
            for host, port in connection.hosts or (("localhost", None),):
                scheme, name_of_host = ("tls", {"tls_hostname": host}) if "tls" in options else ("nats", {})
                address = host or "localhost", port or PORT
                try:
                    server = f"{scheme}://{address[0]}:{address[1]}"
                    self._run(self._connect(server, {**options, **name_of_host}))
                    return
                except TROUBLE as error:
                    failure = error
                    if isinstance(error, NoServersError) and isinstance(self._last_error, TROUBLE):
                        failure = self._last_error  # the library's own does not say why
                    self._refuse(error, *([self._last_error] if self._last_error is not None else []))
                    if "tls" in options:
                        ask_for_refusal(connection, name, *address, greets=True)
            assert failure is not None
            raise failure
        except BaseException:
            self.close()
            raise

    async def _connect(self, server: str, options: dict[str, Any]) -> None:
        await self._end()  # of the host before
        self._client = _Client()
        await self._client.connect(
            server,
            **options,
            name="headgate",
            allow_reconnect=False,
            max_reconnect_attempts=1,  # otherwise it tries a host that refuses for two minutes, and we know others
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            error_cb=self._note_error,
            closed_cb=self._note_closed,
        )

    async def _note_error(self, error: Exception) -> None:
        self._last_error = error
        if _PERMISSION in str(error).lower():
            self._broken.set()

    async def _note_closed(self) -> None:
        self._news.set()
        self._answered.set()
        self._broken.set()

    async def _unless_broken(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a call that would wait for an answer also after the connection is closed."""
        call, broken = asyncio.ensure_future(work), asyncio.ensure_future(self._broken.wait())
        await asyncio.wait({call, broken}, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if not call.done():
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            raise NatsLost(str(self._last_error or "the connection is closed"))
        return call.result()

    async def _note_message(self, message: Msg) -> None:
        self.arrived.append(message)
        self._news.set()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(work)

    def _refuse(self, *errors: BaseException) -> None:
        """Raise `BrokerMisconfigured` if one of these says that another attempt would not help."""
        for error in errors:
            if (refusal := certificate_error(error)) is not None:
                raise BrokerMisconfigured(f"{self.name}: {refusal}") from None
            text = str(error)
            if any(word in text.lower() for word in _REFUSALS):
                raise BrokerMisconfigured(f"{self.name}: the server refuses access: {text}") from None

    def check(self) -> None:
        """Raise what has happened to the connection, if it is not open any more."""
        if self._client is None or not self._client.is_connected:
            if self._last_error is not None:
                self._refuse(self._last_error)
            raise NatsLost(str(self._last_error or "the connection is closed"))

    def subscribe(self) -> str:
        """Return the name of an inbox whose messages come to `arrived`."""
        inbox: str = self._client.new_inbox()
        self._run(self._client.subscribe(inbox, cb=self._note_message))
        return inbox

    def wait(self, wait_s: float) -> None:
        """Let messages, heartbeats and errors come, until a message has, and for so long at most."""
        self.check()

        async def waited() -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(wait_s, 0.001))

        if not self.arrived:
            self._news.clear()
        self._run(waited())
        self.check()

    def publish(self, messages: Sequence[tuple[str, bytes]], reply: str = "") -> None:
        """Publish subjects with payloads, and have the server read them."""
        self.check()

        async def published() -> None:
            for subject, payload in messages:
                await self._client.publish(subject, payload, reply=reply)
            await self._client.flush(timeout=REQUEST_TIMEOUT_S)

        self._run(self._unless_broken(published()))

    @property
    def payload_bytes_max(self) -> int:
        """How long a message may be with its headers (`sent_bytes`), as the server has said."""
        return int(self._client.max_payload)

    def request(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> bytes:
        """Return the answer to one message. Raises `BrokerMisconfigured` if it may not be asked."""
        self.check()
        try:
            question = self._client.request(subject, payload, timeout=REQUEST_TIMEOUT_S, headers=headers)
            answer = self._run(self._unless_broken(question))
        except TROUBLE as error:
            if self._last_error is not None:
                self._refuse(self._last_error)  # a permission that is missing is told in no other way
            raise NatsLost(f"{subject} has no answer: {error!r}") from error
        return bytes(answer.data)

    def ask(self, subject: str, question: object = None) -> dict[str, Any]:
        """Return the answer of JetStream's API. Raises `ApiError`, and as `request` does."""
        payload = b"" if question is None else msgspec.json.encode(question)
        answer: dict[str, Any] = msgspec.json.decode(self.request(f"$JS.API.{subject}", payload))
        if (error := answer.get("error")) is not None:
            raise ApiError(int(error.get("code", 0)), str(error.get("description", "")))
        return answer

    def request_all(self, requests: Sequence[tuple[str, bytes]]) -> int:
        """Send requests, all at once; return how many have an answer."""
        self.check()

        async def answered() -> int:
            inbox = self._client.new_inbox()
            count = 0
            self._answered.clear()

            async def note(_: Msg) -> None:
                nonlocal count
                count += 1
                if count == len(requests):
                    self._answered.set()

            subscription = await self._client.subscribe(inbox, cb=note)
            for subject, payload in requests:
                await self._client.publish(subject, payload, reply=inbox)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._answered.wait(), REQUEST_TIMEOUT_S)
            if self._client.is_connected:
                await subscription.unsubscribe()
            return count

        count = self._run(answered())
        self.check()
        return count

    def close(self) -> None:
        """Close the connection, and end all tasks of the loop."""
        loop = self._loop
        if loop.is_closed():
            return
        try:
            loop.run_until_complete(self._end())
        finally:
            loop.close()

    async def _end(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        with contextlib.suppress(Exception):
            await asyncio.wait_for(client.close(), CLOSE_TIMEOUT_S)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # After an attempt that has failed the library leaves its socket open.
        if (transport := client._transport) is not None:
            with contextlib.suppress(Exception, asyncio.CancelledError):  # the latter of a task that was cancelled here
                transport.close()
                await asyncio.wait_for(transport.wait_closed(), CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)


def read_headers(data: bytes) -> dict[str, str]:
    """Return the headers of a message; the values of one name are joined by ``", "``. Raises ValueError.

    The library puts other characters for what is not UTF-8, leaves lines out, and has the last of several values.
    """
    first, *lines = data.decode().split("\r\n")
    pairs: list[tuple[str, str]] = list(zip(("Status", "Description"), first.split(" ", 2)[1:], strict=False))
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"the line {line!r} has no colon")
        pairs.append((name, value.strip()))
    return joined(pairs)


def sent_bytes(payload: bytes, headers: Mapping[str, str]) -> int:
    """Return how long a message with headers is when it is sent."""
    lines = ["NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), ""]
    return len(payload) + sum(len(line.encode()) + 2 for line in lines)


def _options(connection: Connection) -> dict[str, Any]:
    where = f"the connection {connection.name!r}"
    check_connection(connection, SCHEMES, FILES)
    options: dict[str, Any] = {}
    for option, argument in zip(FILES, ("user_credentials", "nkeys_seed"), strict=True):
        if (path := connection.extra.get(option)) is not None:
            if not os.access(path, os.R_OK):
                raise BrokerMisconfigured(f"{where}: the file of {option} {path} cannot be read")
            options[argument] = path
    # As calls: a traceback that shows local variables would show a password.
    if connection.login and connection.password:
        options |= {"user": lambda: connection.login, "password": lambda: connection.password}
    elif connection.login:
        options["token"] = lambda: connection.login
    if SCHEMES[connection.scheme]:
        options["tls"] = tls_context(connection)
    return options
