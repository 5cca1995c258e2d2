"""What a child can see of the supervisor: tried by a process that is one."""

from __future__ import annotations

import os
import pwd
import selectors
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headgate.cli.main import main
from headgate.supervisor.children.isolation import user_named
from headgate.supervisor.children.process import ChildProcess
from headgate.supervisor.config import ConfigError
from headgate.supervisor.serve import serve
from headgate.supervisor.setting_sources import resolve_settings
from headgate.web.server import ServerRefused

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = pwd.getpwnam("nobody")

# Becomes an ordinary user, hides its memory if it is asked to, and has a child of the same user look at it. The child
# is a fork, because that user may not be able to run this Python.
LOOK = """
import ctypes, os, subprocess, sys
import psutil
from headgate.supervisor.children.isolation import hide_memory
from headgate.supervisor.serve import machine_identity, start_of_process, this_process
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after an exec; a change of the user has hidden it
os.chdir("/")
if sys.argv[1] == "hidden":
    hide_memory()
seen = []
if (child := os.fork()) == 0:
    parent = os.getppid()
    for name in ("environ", "mem", "maps", "fd"):
        path = f"/proc/{parent}/{name}"
        try:
            os.listdir(path) if name == "fd" else open(path, "rb").close()
            seen.append(name)
        except PermissionError:
            pass
    print(seen, flush=True)
    os._exit(0)
os.waitpid(child, 0)
with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as left:  # what the supervisor does with its children
    assert psutil.Process(left.pid).memory_info().rss
    os.close(os.pidfd_open(left.pid))
    left.communicate(b"")
assert this_process().process_started == start_of_process(os.getpid())
assert machine_identity() == machine_identity()
"""


def seen(mode: str) -> str:
    done = subprocess.run([sys.executable, "-c", LOOK, mode], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_child_cannot_read_the_supervisor() -> None:
    assert seen("hidden") == "[]"


def test_a_child_could_read_it_otherwise() -> None:
    assert "environ" in seen("open")


def test_pages_hide_what_they_have_before_they_listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []

    def listen(address: object) -> None:
        done.append("listens")
        raise ServerRefused("it is enough")

    assert main(["--home", str(tmp_path), "db", "upgrade"]) == 0
    monkeypatch.setattr("headgate.supervisor.children.isolation.hide_memory", lambda: done.append("hides"))
    monkeypatch.setattr("headgate.web.server.listen", listen)
    for setting, told in (("true", ["hides", "listens"]), ("false", ["listens"])):
        monkeypatch.setenv("HEADGATE_HIDE_MEMORY", setting)
        assert main(["--home", str(tmp_path), "web"]) == 2
        assert done == told
        done.clear()


@needs_root
def test_a_user_is_found_with_its_groups_and_names_itself_in_the_environment() -> None:
    found = user_named("nobody")
    assert (found.uid, found.gid) == (NOBODY.pw_uid, NOBODY.pw_gid)
    assert 0 not in found.groups
    environment = found.environment({"HOME": "/root", "USER": "root", "TZ": "UTC"})
    assert environment == {"HOME": NOBODY.pw_dir, "USER": "nobody", "TZ": "UTC"}


def test_a_user_that_does_not_exist_is_refused_as_a_setting(tmp_path: Path) -> None:
    settings = resolve_settings(flags={"runner_user": "no such user", "home": tmp_path, "hide_memory": False}).settings
    with pytest.raises(ConfigError, match="runner_user: there is no user 'no such user' on this machine"):
        serve(settings)


def test_another_user_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="only root can run processes as the user 'nobody', and this is '12345'"):
        user_named("nobody")


SYSTEM_PYTHON = "/usr/bin/python3"  # which any user can run, unlike one in somebody's home
TRIES_FILES = """
import os, sys
for path in os.environ["TZ"].split(","):
    try:
        open(path, "rb").close()
        print("read", path)
    except PermissionError:
        print("refused", path)
print("uid", os.getuid(), "gid", os.getgid(), "root's group", 0 in os.getgroups(), os.environ["HOME"])
"""


@needs_root
@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason="there is no Python that any user can run")
@pytest.mark.parametrize("is_separate", [True, False])
def test_users_code_under_another_user_reads_neither_the_key_nor_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_separate: bool
) -> None:
    home, modules = tmp_path / "home", Path(tempfile.mkdtemp())
    home.mkdir(mode=0o700)
    for folder in (modules, *tmp_path.parents, tmp_path):
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)  # so that nothing but the home keeps it out
    (modules / "tries_files.py").write_text(TRIES_FILES)
    (home / "fernet.key").write_text("key")
    (home / "headgate.db").write_text("database")
    (home / "headgate.db").chmod(0o644)
    files = [str(home / "fernet.key"), str(home / "headgate.db")]
    monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    monkeypatch.chdir("/")
    environment = {"PYTHONPATH": str(modules), "TZ": ",".join(files), "HOME": "/root"}
    process = ChildProcess("tries_files", (), environment, run_as=user_named("nobody") if is_separate else None)
    with selectors.DefaultSelector() as selector:
        selector.register(process.pidfd, selectors.EVENT_READ)
        assert selector.select(30)
    lines = [line.decode() for line in process.output.read_empty()]
    process.reap()
    process.close()
    shutil.rmtree(modules)
    verb = "refused" if is_separate else "read"
    who = f"uid {NOBODY.pw_uid} gid {NOBODY.pw_gid}" if is_separate else "uid 0 gid 0"
    assert lines[:2] == [f"{verb} {path}" for path in files]
    assert lines[2].startswith(who)
    assert not is_separate or lines[2].endswith(f"False {NOBODY.pw_dir}")
