"""Clients of signals over gRPC and their server, killed again and again: nothing is lost, missing or there twice."""

from __future__ import annotations

import math
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.lives import Life, Lives
from tests.proof.remote_worker import AT_ONCE_MAX, KEY, LAST, TOKEN, read
from tests.waiting import ALL_WITHIN_S

from headgate.client import open_client
from headgate.signals.remote import GrpcSignalService

SENDERS = 4  # every second one is killed, and sends again by dedups of its own
COUNT = 60  # signals of each
LISTENERS = 2
# How often each is killed, and after how many steps at most. Together fewer than there are in any case: the four that
# send have 20 calls or more each, the server commits no more than 12 signals of theirs at once, and comes to two marks.
SENDER_KILLS, SENDER_CALLS_MAX = 4, COUNT // AT_ONCE_MAX
LISTENER_KILLS, LISTENER_VERSIONS_MAX = 6, 30
SERVER_KILLS, SERVER_MARKS_MAX = 6, 6
SERVER_S_MAX = 2.0  # later ones live no longer, whatever they are at

Numbered = tuple[int, str]  # a version and its value


def findings(stored: Sequence[Numbered], answered: Sequence[Numbered], heard: Sequence[Numbered]) -> list[str]:
    """Return what is wrong with what was stored under a key, answered to senders, and heard by one listener."""
    found = []
    if [version for version, _ in stored] != list(range(1, len(stored) + 1)):
        found.append("versions are not dense")
    values = Counter(value for _, value in stored)
    found += [f"{value} is stored {count} times" for value, count in values.items() if count > 1]
    by_version = dict(stored)
    found += [
        f"{value} was answered with version {version}, which is {by_version.get(version)}"
        for version, value in answered
        if by_version.get(version) != value
    ]
    for version, count in Counter(version for version, _ in heard).items():
        if count > 1:
            found.append(f"version {version} was heard {count} times")
    found += [f"version {version} was not heard" for version in sorted(by_version.keys() - dict(heard).keys())]
    found += [f"version {version} was heard as {value}" for version, value in heard if by_version.get(version) != value]
    if [version for version, _ in heard] != sorted(version for version, _ in heard):
        found.append("versions were heard out of order")
    return found


GOOD = [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize(
    ("stored", "answered", "heard", "named"),
    [
        (GOOD, GOOD, GOOD, None),
        ([*GOOD[:2], (4, "c")], [], [*GOOD[:2], (4, "c")], "versions are not dense"),
        ([*GOOD, (4, "a")], GOOD, [*GOOD, (4, "a")], "a is stored 2 times"),
        (GOOD, [*GOOD, (4, "d")], GOOD, "d was answered with version 4, which is None"),
        (GOOD, [(1, "b")], GOOD, "b was answered with version 1, which is a"),
        (GOOD, GOOD, [*GOOD, (3, "c")], "version 3 was heard 2 times"),
        (GOOD, GOOD, [GOOD[0], GOOD[2]], "version 2 was not heard"),
        (GOOD, GOOD, [GOOD[1], GOOD[0], GOOD[2]], "versions were heard out of order"),
        (GOOD, GOOD, [GOOD[0], (2, "x"), GOOD[2]], "version 2 was heard as x"),
    ],
)
def test_whatever_is_wrong_is_found(
    stored: list[Numbered], answered: list[Numbered], heard: list[Numbered], named: str | None
) -> None:
    found = findings(stored, answered, heard)
    assert found == [] if named is None else named in found


class Processes:
    """Runs workers, and starts those that were killed again."""

    def __init__(self, lives: Lives, url: str) -> None:
        self._lives = lives
        self._url = url
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self.target = f"127.0.0.1:{self._port}"
        self.kills: Counter[str] = Counter()
        self.is_over = threading.Event()

    def serve(self) -> None:
        """Keep a server running until it is over; the last one ends in order."""
        for life in range(1000):
            dies = f"--dies-after={random.randint(1, SERVER_MARKS_MAX) if life < SERVER_KILLS else 0}"
            server = self._lives.start("serve", self._url, self._port, dies)
            server.said.readline()  # it serves
            code = self._end_of(server, math.inf if life < SERVER_KILLS else random.uniform(0.0, SERVER_S_MAX))
            said = server.close()
            if code == 0:
                return
            assert code == -signal.SIGKILL, f"the server has left with {code}: {said}"
            self.kills["server"] += 1

    def _end_of(self, server: Life, within_s: float) -> int:
        ends_at = time.monotonic() + within_s
        while (code := server.poll()) is None:
            if self.is_over.wait(0.02):
                server.send_signal(signal.SIGTERM)
                assert server.wait() == 0
            elif time.monotonic() >= ends_at:
                server.kill()
        return code

    def send(self, number: int) -> str:
        """Have a sender send all that it has to; return what it was answered."""
        if not number % 2:
            return self.run("send", str(number), str(COUNT), kills=0, steps_max=0)
        arguments = ("send", str(number), str(COUNT), "--dedup")
        return self.run(*arguments, kills=SENDER_KILLS, steps_max=SENDER_CALLS_MAX)

    def listen(self, file: Path) -> None:
        """Have a listener hear all that is sent."""
        self.run("listen", str(file), kills=LISTENER_KILLS, steps_max=LISTENER_VERSIONS_MAX)

    def run(self, kind: str, *arguments: str, kills: int, steps_max: int) -> str:
        """Run a client until it is done, and have it killed so often; return what all of its lives have said."""
        said = ""
        for life in range(kills + 1):
            dies = f"--dies-after={random.randint(1, steps_max) if life < kills else 0}"
            code, told = self._lives.run(kind, self.target, *arguments, dies)
            assert code == (-signal.SIGKILL if life < kills else 0), told
            said += told
            self.kills[kind] += life < kills
        return said


@pytest.mark.campaign
def test_whoever_is_killed_each_signal_is_stored_once_and_each_version_heard_once(
    database_url: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"heard-{number}" for number in range(LISTENERS)]
    with Lives("tests.proof.remote_worker") as lives, ThreadPoolExecutor(SENDERS + LISTENERS + 1) as threads:
        processes = Processes(lives, database_url)
        serving = threads.submit(processes.serve)
        try:
            listening = [threads.submit(processes.listen, file) for file in files]
            sending = [threads.submit(processes.send, number) for number in range(SENDERS)]
            said = [sender.result(ALL_WITHIN_S) for sender in sending]
            with GrpcSignalService(processes.target, TOKEN, retry_s=ALL_WITHIN_S) as service:
                service.send_signal(KEY, LAST, dedup=LAST)
            for one in listening:
                one.result(ALL_WITHIN_S)
        finally:
            processes.is_over.set()
        serving.result(ALL_WITHIN_S)
    words = [line.split() for lives in said for line in lives.splitlines() if line != "done"]
    answered = [(int(version), value) for value, version in words]
    with open_client(database_url) as client:
        stored = [(one.version, one.value) for one in client.list_signals(KEY)]
    assert len(stored) == SENDERS * COUNT + 1
    assert {value for _, value in answered} | {LAST} == {value for _, value in stored}
    for file in files:
        assert findings(stored, answered, read(file)) == []
    assert processes.kills["server"] >= SERVER_KILLS
    assert processes.kills["send"] == SENDERS // 2 * SENDER_KILLS
    assert processes.kills["listen"] == LISTENERS * LISTENER_KILLS
    print(f"{dict(processes.kills)} kills; {len(stored)} signals, heard by {LISTENERS}")
