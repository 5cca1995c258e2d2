"""``headgate signals serve``: a process of its own, its token, TLS, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.waiting import WITHIN_S

from headgate.signals.remote import GrpcSignalService, SignalsRefused

TOKEN = "0123456789abcdef-token"
PREFIX = "serving signals on "


def environment_of(url: str, **more: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    return environment | {"HEADGATE_DATABASE_URL": url} | more


def run(url: str, *arguments: str, **more: str) -> tuple[int, str]:
    """Return the exit code of a server that does not start, and what it says."""
    command = [sys.executable, "-m", "headgate.cli", "signals", "serve", *arguments]
    ran = subprocess.run(
        command, env=environment_of(url, **more), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    return ran.returncode, ran.stderr.strip()


@contextmanager
def serving(
    url: str, *arguments: str, stderr: IO[str] | None = None, **more: str
) -> Generator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "headgate.cli", "signals", "serve", "--grpc", "127.0.0.1:0", *arguments]
    environment = environment_of(url, **more)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(PREFIX), line
            yield process, line.removeprefix(PREFIX).strip()
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_asked_to_stop(database_url: str, number: signal.Signals) -> None:
    with serving(database_url, HEADGATE_SIGNALS_TOKEN=TOKEN) as (process, address):
        with GrpcSignalService(address, TOKEN) as service:
            assert service.send_signal("a", 1).version == 1
            listening = service.listen_signal("me", "a", after=0)
            assert next(listening).value == 1
            process.send_signal(number)
            assert process.wait(WITHIN_S) == 0


def test_systemd_is_told_when_it_is_ready_and_that_it_stops(sqlite_url: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WITHIN_S)
        with serving(sqlite_url, "--no-token", NOTIFY_SOCKET=str(tmp_path / "notify")) as (process, _):
            assert systemd.recv(100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=5000000"
            assert process.wait(WITHIN_S) == 0


def test_the_token_may_be_in_a_file(sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with serving(sqlite_url, "--token-file", str(file)) as (_, address):
        with GrpcSignalService(address, TOKEN) as service:
            assert service.send_signal("a").version == 1
        with GrpcSignalService(address) as nobody, pytest.raises(SignalsRefused, match="the token is missing or wrong"):
            nobody.send_signal("a")


def test_on_this_machine_it_may_answer_everybody_if_it_is_told_so(sqlite_url: str) -> None:
    with serving(sqlite_url, "--no-token") as (_, address), GrpcSignalService(address) as service:
        assert service.send_signal("a").version == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--grpc", "127.0.0.1:0"), "callers need a token: set HEADGATE_SIGNALS_TOKEN, or give --token-file FILE"),
        (("--grpc", "nowhere", "--no-token"), "'nowhere' is not an address"),
        (("--grpc", "0.0.0.0:0", "--no-token"), "without a token give an address of this one"),
        (("--grpc", "0.0.0.0:0"), "the token would be sent in clear"),
        (("--grpc", "127.0.0.1:0", "--no-token", "--key", "x"), "--certificate and --key go together"),
    ],
)
def test_what_is_not_safe_is_refused(sqlite_url: str, arguments: tuple[str, ...], problem: str) -> None:
    code, said = run(sqlite_url, *arguments)
    assert (code, problem in said) == (2, True), said


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (("--no-token", "--token-file", "x"), {}, "--no-token goes without --token-file: callers need a token, or"),
        (("--no-token",), {"HEADGATE_SIGNALS_TOKEN": TOKEN}, "--no-token goes without HEADGATE_SIGNALS_TOKEN: callers"),
        (
            ("--plaintext", "--certificate", "x", "--key", "y"),
            {},
            "--plaintext goes without --certificate: the link is",
        ),
        (("--plaintext", "--key", "y"), {}, "--plaintext goes without --key: the link is TLS, or it is not"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_contradict_each_other_are_refused(
    sqlite_url: str, arguments: tuple[str, ...], variables: dict[str, str], problem: str
) -> None:
    code, said = run(sqlite_url, "--grpc", "127.0.0.1:0", *arguments, **variables)
    assert (code, said.startswith(f"headgate: {problem}")) == (2, True), said
    assert len(said.splitlines()) == 1


def test_an_address_that_is_in_use_is_named(sqlite_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = run(sqlite_url, "--grpc", address, "--no-token")
    problem = f"headgate: cannot listen on {address}: Address already in use; choose another address with --grpc"
    assert (code, said.splitlines()) == (2, [problem])


def test_a_short_token_and_one_without_a_file_are_refused(sqlite_url: str, tmp_path: Path) -> None:
    assert run(sqlite_url, "--grpc", "127.0.0.1:0", HEADGATE_SIGNALS_TOKEN="short") == (
        2,
        "headgate: the token in HEADGATE_SIGNALS_TOKEN must have 16 characters or more, not 5",
    )
    code, said = run(sqlite_url, "--grpc", "127.0.0.1:0", "--token-file", str(tmp_path / "none"))
    assert (code, said) == (1, f"headgate: {tmp_path / 'none'}: No such file or directory")


def test_without_its_database_it_does_not_start(tmp_path: Path) -> None:
    code, said = run(f"sqlite:///{tmp_path}/none.db", "--grpc", "127.0.0.1:0", "--no-token")
    assert (code, "there is no database" in said) == (1, True)


def test_a_database_file_that_was_replaced_ends_it(sqlite_url: str, tmp_path: Path) -> None:
    with serving(sqlite_url, "--no-token") as (process, address), GrpcSignalService(address, retry_s=0.0) as service:
        service.send_signal("a")
        (tmp_path / "headgate.db").rename(tmp_path / "moved.db")
        with pytest.raises(Exception, match=r"the database cannot be used|is stopping|does not answer"):
            service.send_signal("a")
        assert process.wait(WITHIN_S) == 5


def test_without_the_extra_it_says_what_to_install(sqlite_url: str) -> None:
    hidden = "import sys; sys.modules['grpc'] = None; from headgate.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", hidden, "signals", "serve", "--grpc", "127.0.0.1:0", "--no-token"]
    ran = subprocess.run(command, env=environment_of(sqlite_url), capture_output=True, text=True, check=False)
    assert (ran.returncode, 'pip install "headgate[grpc]"' in ran.stderr) == (1, True), ran.stderr
    client = "import sys; sys.modules['grpc'] = None; import headgate.signals, headgate.signals.remote"
    ran = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, check=False)
    assert 'signals over gRPC need an extra: pip install "headgate[grpc]"' in ran.stderr


def test_a_client_imports_nothing_of_the_supervisors_side() -> None:
    program = (
        "import sys, headgate.signals.remote; "
        "print([name for name in sys.modules if name.startswith(('headgate.store', 'headgate.supervisor', "
        "'headgate.client', 'headgate.signal_server', 'sqlalchemy', 'psycopg', 'trio'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
