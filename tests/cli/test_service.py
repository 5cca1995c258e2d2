"""`headgate service install`: the files that it writes, and what systemd says of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Call

from headgate.cli.commands import service
from headgate.signal_server.server import DRAIN_S
from headgate.supervisor.config import Settings
from headgate.supervisor.leaving import DRAIN_MARGIN_S, HANG_MARGIN_S

NEEDS_SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
SERVICE, PAGES, SIGNALS = (f"etc/systemd/system/headgate{name}.service" for name in ("", "-web", "-signals"))
USERS = "etc/sysusers.d/headgate.conf"


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that others may enter, with a program of the name."""
    program = tmp_path / "opt" / "bin" / "headgate"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    # Folders of tests may be closed to others, and these are not: what is above them is not looked at.
    monkeypatch.setattr("headgate.cli.commands.service._closed_to_others", lambda path: None)
    monkeypatch.setattr(sys, "prefix", str(program.parent.parent))
    return program


def settings_in(unit: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))


def test_it_writes_units_that_run_this_installation(call: Call, installation: Path, tmp_path: Path) -> None:
    root = tmp_path / "image"
    called = call("service", "install", "--root", str(root), "--user", "jobs", "--folder", "/srv/shop", "--web")
    assert called.code == 0, called.err
    service = settings_in((root / SERVICE).read_text())
    assert service["ExecStart"] == f"{installation} up --dags /srv/shop/dags"
    assert (service["User"], service["WorkingDirectory"]) == ("jobs", "/srv/shop")
    assert (service["Type"], service["KillMode"], service["RestartPreventExitStatus"]) == ("notify", "mixed", "2")
    assert int(service["TimeoutStopSec"]) > Settings().drain_s + DRAIN_MARGIN_S + HANG_MARGIN_S
    pages = settings_in((root / PAGES).read_text())
    assert pages["ExecStart"] == f"{installation} web"
    assert pages["InaccessiblePaths"] == "-/var/lib/headgate/fernet.key"
    assert pages["PrivateUsers"] == "yes", "else /proc/PID/root of the supervisor, which has the same user, leads to it"
    assert (root / USERS).read_text().splitlines()[-1] == 'u jobs - "headgate" /var/lib/headgate'
    assert "systemctl enable --now headgate headgate-web" in called.out
    assert "$" not in (root / SERVICE).read_text()


def test_the_server_of_signals_has_a_unit_whose_token_systemd_reads(
    call: Call, installation: Path, tmp_path: Path
) -> None:
    assert not (tmp_path / SIGNALS).exists()
    called = call("service", "install", "--root", str(tmp_path), "--signals", "--user", "jobs")
    assert called.code == 0, called.err
    unit = settings_in((tmp_path / SIGNALS).read_text())
    name, _, token = unit["LoadCredential"].partition(":")
    command = unit["ExecStart"].split()
    assert command == [*f"{installation} signals serve --grpc 127.0.0.1:50551 --token-file".split(), f"%d/{name}"]
    assert (unit["Type"], unit["User"], unit["RestartPreventExitStatus"]) == ("notify", "jobs", "2")
    assert int(unit["TimeoutStopSec"]) > DRAIN_S
    assert unit["InaccessiblePaths"] == "-/var/lib/headgate/fernet.key"
    assert f"openssl rand -hex 32 > {token}" in called.out
    assert "systemctl enable --now headgate headgate-signals\n" in called.out
    assert not (tmp_path / PAGES).exists()


@NEEDS_SYSTEMD
def test_systemd_finds_nothing_wrong_with_them(call: Call, installation: Path, tmp_path: Path) -> None:
    assert call("service", "install", "--root", str(tmp_path), "--web", "--signals").code == 0
    checked = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / unit) for unit in (SERVICE, PAGES, SIGNALS))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stderr) == (0, "")
    for unit, most in ((SERVICE, 45), (PAGES, 20), (SIGNALS, 20)):  # of 100; a unit without settings has 96
        exposed = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", f"--threshold={most}", str(tmp_path / unit)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert exposed.returncode == 0, exposed.stdout


def test_files_that_differ_are_replaced_only_if_that_is_asked_for(
    call: Call, installation: Path, tmp_path: Path
) -> None:
    assert call("service", "install", "--root", str(tmp_path)).code == 0
    assert "wrote" not in call("service", "install", "--root", str(tmp_path)).out  # they are as they should be
    (tmp_path / SERVICE).write_bytes(b"mine \xff")
    refused = call("service", "install", "--root", str(tmp_path), "--web")
    assert refused.code == 1
    assert "headgate.service is there and differs" in refused.err
    assert (tmp_path / SERVICE).read_bytes() == b"mine \xff"
    assert not (tmp_path / PAGES).exists()
    assert call("service", "install", "--root", str(tmp_path), "--web", "--force").code == 0
    assert "Type=notify" in (tmp_path / SERVICE).read_text()


def test_they_can_be_printed(call: Call, installation: Path, tmp_path: Path) -> None:
    printed = call("service", "install", "--print", "--root", str(tmp_path / "none"))
    assert printed.out.startswith("# /etc/sysusers.d/headgate.conf\n")
    assert "Type=notify" in printed.out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--user", "Head Gate"], "'Head Gate' is not a name of a Unix user"),
        (["--folder", "shop"], "--folder, 'shop', has to be an absolute path"),
        (["--folder", "/srv/100%"], "--folder, '/srv/100%', has to be an absolute path"),
    ],
)
def test_a_name_that_systemd_would_read_otherwise_is_refused(
    call: Call, installation: Path, options: list[str], said: str
) -> None:
    refused = call("service", "install", "--print", *options)
    assert refused.code == 2
    assert said in refused.err


def test_an_installation_that_the_user_cannot_run_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "closed" / "bin" / "headgate"
    program.parent.mkdir(parents=True)
    program.touch()
    program.parent.parent.chmod(0o700)
    monkeypatch.setattr(sys, "prefix", str(program.parent.parent))
    refused = call("service", "install", "--print")
    assert refused.code == 1
    assert f"headgate cannot run {program}, because others may not enter {program.parent.parent}" in refused.err
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "open"))
    (tmp_path / "open" / "bin").mkdir(parents=True)
    (tmp_path / "open" / "bin" / "headgate").touch()
    monkeypatch.setattr(sys, "executable", str(program))
    closed = service._closed_to_others
    monkeypatch.setattr(service, "_closed_to_others", lambda path: closed(path) if path == program else None)
    assert f"headgate cannot run {program}, because" in call("service", "install", "--print").err
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert f"there is no {tmp_path}/bin/headgate" in call("service", "install", "--print").err
