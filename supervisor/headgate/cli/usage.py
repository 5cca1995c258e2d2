"""``--help`` and usage errors, for all commands: flags without a type, paragraphs unwrapped, errors in users' words."""

from __future__ import annotations

import difflib
import inspect
import re
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

GLOBAL_OPTIONS = {"--config": "FILE", "--home": "DIR", "--db": "URL", "--debug": ""}

PANELS = ("Run", "DAGs and tasks", "Triggers and events", "Maintain", "Learn and check")
RUN, DAGS, TRIGGERS, MAINTAIN, LEARN = PANELS

_NO_CHOICE = re.compile(r"(?P<before>.*)'(?P<given>[^']*)' is not one of (?P<choices>.*?)\.?", re.DOTALL)


class Command(TyperCommand):
    """A command whose help shows metavars only: `--json`, not `--json <bool>`; `DAG`, not `DAG <str>`."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, without the types that the library would show for them."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands with the same help; its panels are in the order of `PANELS`."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, without the types that the library would show for them."""
        return _without_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, panel by panel."""
        order = {panel: number for number, panel in enumerate(PANELS)}
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        return sorted(super().list_commands(ctx), key=lambda name: order.get(str(panels[name]), 0))


def _no_type(ctx: Any) -> str:
    return ""


def _without_types(params: Any) -> Any:
    for param in params:
        if getattr(param, "metavar", None) is None or param.param_type_name == "argument":
            param.display_type_rich = _no_type
    return params


def prepare_help(app: typer.Typer) -> None:
    """Have all commands of an application, and of its groups, print their help in this way."""
    for command in app.registered_commands:
        command.cls = Command
        text = inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if isinstance(group.typer_instance, typer.Typer):
            group.cls = Group
            prepare_help(group.typer_instance)


def _without_value(text: str) -> str:
    """Return a usage error of a command that takes a secret, which may stand anywhere in a malformed call."""
    if text.startswith(("Missing", "Option")) or "--description" in text:
        return text
    return (
        "expected NAME VALUE: quote a value that has spaces, write `--` before the name if the value begins with `-`, "
        "or `-` as the value to read it from standard input"
    )


def usage_error(exc: typer.TyperException, arguments: list[str]) -> str:
    """Return the text of an error in the command line; empty if there is nothing to say beside the help."""
    text = exc.format_message()
    option = getattr(exc, "option_name", None)
    if any(list(pair) in (["variables", "set"], ["connections", "set"]) for pair in pairwise(arguments)):
        return _without_value(text)
    if option in GLOBAL_OPTIONS and option in arguments:
        place = arguments.index(option)  # what follows it may be a URL with a password
        rest = arguments[:place] + arguments[place + (2 if GLOBAL_OPTIONS[option] else 1) :]
        words = [word for word in rest if not word.startswith("-")][:2]
        return f"{option} goes before the command: headgate {option} {GLOBAL_OPTIONS[option]} {' '.join(words)} ..."
    text = text.replace("Value error, ", "")
    text = re.sub(r"Input should be a valid integer.*", "expected a whole number", text)
    text = re.sub(r"Input should be a valid number.*", "expected a number", text)
    text = re.sub(r"Input should be greater than or equal to (\S+)", r"expected \1 or more", text)
    text = re.sub(r"Input should be less than or equal to (\S+)", r"expected \1 or less", text)
    if (found := _NO_CHOICE.fullmatch(text)) is not None:
        choices = re.findall(r"'([^']*)'", found["choices"])
        near = difflib.get_close_matches(found["given"], choices, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(choices)}"
        return f"{found['before']}there is no {found['given']!r}; {hint}"
    return text
