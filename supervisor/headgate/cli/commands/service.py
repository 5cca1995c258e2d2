"""``headgate service``: units for systemd, filled in for this installation."""

from __future__ import annotations

import os
import re
import stat
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError

app = typer.Typer(help="Run headgate as a service of systemd.", no_args_is_help=True)

USER, FOLDER = "headgate", Path("/srv/headgate")
# Where the administrator of a machine puts such files, and the name of each in this package.
_SUPERVISOR = {
    "etc/sysusers.d/headgate.conf": "headgate.sysusers",
    "etc/systemd/system/headgate.service": "headgate.service",
}
_SIGNALS = {"etc/systemd/system/headgate-signals.service": "headgate-signals.service"}
_TOKEN = "/etc/headgate/signals.token"  # as that unit has it
_PAGES = {"etc/systemd/system/headgate-web.service": "headgate-web.service"}

# systemd gives spaces, quotes, $ and % a meaning of their own.
_PLAIN_PATH = re.compile(r"/[\w./@+-]*")
_USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")


@app.command()
def install(
    user: Annotated[str, typer.Option(metavar="NAME", help="The Unix user that it runs as.")] = USER,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of headgate.toml, of your modules, and of dags/.")
    ] = FOLDER,
    web: Annotated[bool, typer.Option("--web", help="Also a unit for the pages.")] = False,
    signals: Annotated[bool, typer.Option("--signals", help="Also a unit for the server of signals.")] = False,
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Write below this folder instead, as for the image of a machine.")
    ] = Path("/"),
    only_print: Annotated[bool, typer.Option("--print", help="Print the files, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
) -> None:
    """Write unit files for systemd, and say what to do next. Nothing is started or enabled.

    The supervisor keeps its database and its keys in /var/lib/headgate. The units run the `headgate` of the environment
    that this command is run from.
    """
    names = _SUPERVISOR | (_PAGES if web else {}) | (_SIGNALS if signals else {})
    files = _filled_in(user, folder, names)
    if only_print:
        for name, text in files.items():
            print(f"# /{name}\n{text}")
        return
    for name in _to_write(files, root, force=force):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(files[name])
        beside.chmod(0o644)
        beside.replace(path)
        print(f"wrote {path}")
    _print_next(user, folder, web=web, signals=signals)


def _filled_in(user: str, folder: Path, names: dict[str, str]) -> dict[str, str]:
    if not _USER_NAME.fullmatch(user):
        raise CommandError(f"{user!r} is not a name of a Unix user", exit_code=2)
    executable = Path(sys.prefix) / "bin" / "headgate"
    for path, meaning in ((folder, "--folder"), (executable, "the path of this installation")):
        if not _PLAIN_PATH.fullmatch(str(path)):
            raise CommandError(
                f"{meaning}, {str(path)!r}, has to be an absolute path of letters, digits and ._@+-", exit_code=2
            )
    if not executable.exists():
        raise CommandError(f"there is no {executable}: run this from the environment that headgate is installed in")
    for program in (executable, Path(sys.executable).resolve()):
        if (closed := _closed_to_others(program)) is not None:
            raise CommandError(
                f"{user} cannot run {program}, because others may not enter {closed}: install headgate in a folder "
                "such as /opt/headgate, with a Python that all may run, and run this from there"
            )
    values = {"user": user, "folder": str(folder), "executable": str(executable)}
    units = resources.files("headgate.cli.units")
    return {name: Template((units / source).read_text()).substitute(values) for name, source in names.items()}


def _closed_to_others(path: Path) -> Path | None:
    """Return the folder above ``path`` that only its owner can enter, unless there is none."""
    return next((folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH), None)


def _to_write(files: dict[str, str], root: Path, *, force: bool) -> list[str]:
    missing = [name for name in files if not (root / name).exists()]
    different = [name for name in files if name not in missing and (root / name).read_bytes() != files[name].encode()]
    if different and not force:
        named = ", ".join(str(root / name) for name in different)
        raise CommandError(f"nothing was written: {named} is there and differs; --force replaces it")
    if (missing or different) and root == Path("/") and os.geteuid() != 0:
        raise CommandError("only root can write to /etc: use sudo, or --print")
    return missing + different


def _print_next(user: str, folder: Path, *, web: bool, signals: bool) -> None:
    units = "headgate" + (" headgate-web" if web else "") + (" headgate-signals" if signals else "")
    print("next, as root:")
    print("  systemd-sysusers headgate.conf")
    print(f"  install -d -o {user} -g {user} {folder} {folder}/dags")
    if signals:
        print(f"  install -D -m 600 /dev/null {_TOKEN} && openssl rand -hex 32 > {_TOKEN}    # callers need it")
    print("  systemctl daemon-reload")
    print(f"  systemctl enable --now {units}")
    if web:
        print("  journalctl -u headgate-web    # has the link to log in with")
