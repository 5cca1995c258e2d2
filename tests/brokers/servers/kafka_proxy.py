"""A proxy before a server that speaks Kafka's protocol: TLS, and logins, checked for a server that has none."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from headgate.testing.brokers.kafka_station import KafkaAckParser, KafkaStation, whole_frames
from headgate.testing.brokers.station import WITHIN_S, free_port

READ_BYTES_MAX = 65_536


class Logins(Protocol):
    """Answers requests about logins in the place of the broker; one for each connection."""

    def answer(self, request: bytes) -> bytes | None:
        """Return the answer to a request, each without its length; None if it is for the broker."""


ROUNDS = 5  # of the loop, until all that was begun has gone as far as it goes by itself


class KafkaProxy:
    """Stands before a station's server, ends TLS and checks logins there, and has clients stay with it; `close` it."""

    def __init__(
        self,
        station: KafkaStation,
        context: ssl.SSLContext | None = None,
        make_logins: Callable[[], Logins] | None = None,
    ) -> None:
        self._server = int(station.address.rpartition(":")[2])
        self._context = context
        self._make_logins = make_logins
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(WITHIN_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # of clients that refuse our certificate
        listening = asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        server = self._loop.run_until_complete(listening)
        self._is_ready.set()
        self._loop.run_forever()
        for listening_on in server.sockets:
            self._loop.remove_reader(listening_on)
        self._let_run()  # who was just accepted gets a task, which closes the connection; not of a closed server
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._let_run()  # what is closed is told so
        self._loop.close()

    def _let_run(self) -> None:
        for _ in range(ROUNDS):
            self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        try:
            await self._pass_on(client, answers)
        finally:
            answers.transport.abort()

    async def _pass_on(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server, requests = await asyncio.open_connection("127.0.0.1", self._server)
        parser = KafkaAckParser({}, self._server, self.port)

        logins = None if self._make_logins is None else self._make_logins()

        async def forward() -> None:
            waiting = b""
            while data := await client.read(READ_BYTES_MAX):
                frames, waiting = ([data], b"") if logins is None else whole_frames(waiting + data)
                for frame in frames:
                    if logins is not None and (answer := logins.answer(frame[4:])) is not None:
                        answers.write(struct.pack(">i", len(answer)) + answer)
                    else:
                        requests.write(frame)
                await requests.drain()
            requests.close()

        async def back() -> None:
            while data := await server.read(READ_BYTES_MAX):
                answers.write(parser.pass_answer(data))
                await answers.drain()
            answers.close()

        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(forward(), back())
        finally:
            requests.transport.abort()
