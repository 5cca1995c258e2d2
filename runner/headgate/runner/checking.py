"""One check of a trigger, or of its broker: ``python -P -m headgate.runner.checking``, started by commands only.

It loads the trigger as the runner would (`headgate.runner.loading`), in a process of its own, because this runs users'
code. A name that is wrong is answered with the nearest one, and an exception of the author's code with its line.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import pkgutil
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

import headgate.runner
from headgate.child.error_text import describe_error
from headgate.child.forks import cut_off_forks
from headgate.child.parent_death import die_with
from headgate.protocol.messages.checks import (
    BrokerChecked,
    Check,
    CheckBroker,
    CheckTrigger,
    OtherTrigger,
    TriggerChecked,
)
from headgate.protocol.messages.runner import TriggerSpec
from headgate.protocol.values import decode_value
from headgate.runner.loading import TriggerNotLoaded, import_class, load_trigger
from headgate.streams.group_settings import Source
from headgate.streams.identity import stream_of
from headgate.triggers.base import BaseEventTrigger, BaseTrigger

READ_BYTES_MAX = 64 * 1024  # of the question, in one read
NOTES_MAX = 20  # in an answer
ARGUMENTS_NAMED_MAX = 20  # of a constructor, in an answer
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_OWN_FOLDER = str(Path(headgate.runner.__path__[0]))


def main() -> NoReturn:
    """Answer one question, and end the process, whatever threads the author's code has left."""
    parser = argparse.ArgumentParser(prog="python -m headgate.runner.checking", description=__doc__)
    for name in ("--frames-fd", "--logs-fd", "--supervisor-pid"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    die_with(arguments.supervisor_pid)
    for descriptor in (arguments.frames_fd, arguments.logs_fd):
        os.set_inheritable(descriptor, False)
    cut_off_forks(arguments.frames_fd, arguments.logs_fd)
    with socket.socket(fileno=arguments.frames_fd) as link:
        parts = []
        while part := link.recv(READ_BYTES_MAX):
            parts.append(part)
        question: Check = msgspec.msgpack.decode(b"".join(parts), type=Check)
        answer: TriggerChecked | BrokerChecked
        if isinstance(question, CheckBroker):
            answer = check_broker(question)
        else:
            sys.path += [folder for folder in question.import_paths if folder not in sys.path]
            answer = check(question)
        sys.stdout.flush()
        sys.stderr.flush()
        link.sendall(msgspec.msgpack.encode(answer))
    os._exit(0)


def check(question: CheckTrigger) -> TriggerChecked:
    """Load the trigger, and say why it cannot be loaded, if it cannot."""
    try:
        cls = import_class(question.classpath)
        problem, notes = _wrong_kwargs(cls, question.classpath, decode_value(question.kwargs)), list[str]()
        if not problem:
            notes = _neighbours(_loaded(question.classpath, question.kwargs), question.others)
    except TriggerNotLoaded as exc:
        near = _nearest(question.classpath.split("."), question.import_paths)
        # The name that is there, in place of the question about another folder.
        return TriggerChecked(f"{str(exc).partition(';')[0]}; did you mean {near}?" if near else str(exc))
    except BaseException as exc:  # users' code may raise anything, even SystemExit
        text, trace = describe_error(exc)
        place = _place(exc)
        return TriggerChecked(f"{text} ({place})" if place else text, trace)
    return TriggerChecked(problem, notes=tuple(notes[:NOTES_MAX]))


def _loaded(classpath: str, kwargs: bytes) -> BaseTrigger:
    return load_trigger(TriggerSpec(0, "", classpath, classpath, kwargs))


def _neighbours(trigger: BaseTrigger, others: Sequence[OtherTrigger]) -> list[str]:
    """Return which of the others read the same stream with other arguments. Raises whatever the trigger's code does."""
    stream, notes = stream_of(trigger), list[str]()
    if stream is None or not isinstance(trigger, BaseEventTrigger):
        return notes
    own = Source(type(trigger), trigger.serialize()[1])
    for other in others:
        with suppress(BaseException):  # those are not what is checked
            there = _loaded(other.classpath, other.kwargs)
            if isinstance(there, BaseEventTrigger) and stream_of(there) == stream:
                differs = Source(type(there), there.serialize()[1]).differences(own)
                if differs:
                    said = ", ".join(f"{name}={how}" for name, how in differs.items())
                    notes.append(f"the watcher {other.name} reads the same stream, with {said}")
    return notes


def check_broker(question: CheckBroker) -> BrokerChecked:
    """Connect as the trigger's producer would, and say what it finds. No message is taken."""
    try:
        from headgate.brokers.broker_trigger import BrokerTrigger  # other checks need none of it

        trigger = import_class(question.classpath)(**decode_value(question.kwargs))
        assert isinstance(trigger, BrokerTrigger)
        return trigger.check(question.connection)
    except BaseException as exc:  # of a client
        return BrokerChecked(problem=describe_error(exc)[0])


def _wrong_kwargs(cls: type[Any], classpath: str, kwargs: Mapping[str, Any]) -> str:
    """Return which arguments the constructor does not take, or lacks; "" if it takes these, or does not tell."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return ""
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name, parameter in parameters.items() if parameter.kind in _BY_KEYWORD]
    takes = f"it takes {', '.join(known[:ARGUMENTS_NAMED_MAX])}" if known else "it takes none"
    if Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                return f"{classpath} has no argument {name!r}{f'; did you mean {near[0]!r}?' if near else ''} ({takes})"
    missing = [name for name in known if parameters[name].default is Parameter.empty and name not in kwargs]
    return f"{classpath} needs the argument {missing[0]!r} ({takes})" if missing else ""


def _nearest(names: list[str], import_paths: Sequence[str]) -> str | None:
    """Return the classpath that exists and is nearest to this one, as far as its first wrong part; None if none is.

    Modules are looked for in the user's folders: one of the standard library is hardly meant.
    """
    found: object = None
    for depth, name in enumerate(names):
        known = {module.name for module in pkgutil.iter_modules(import_paths)} if found is None else _names_in(found)
        if name not in known and (found is not None or name not in sys.modules):
            near = difflib.get_close_matches(name, known, n=1)
            return ".".join((*names[:depth], near[0], *names[depth + 1 :])) if near else None
        found = sys.modules.get(".".join(names[: depth + 1])) or getattr(found, name, None)
    return None


def _names_in(found: object) -> set[str]:
    """Return the names that a module or a class has, with the modules in a package."""
    names = {name for name in vars(found) if not name.startswith("_")} if hasattr(found, "__dict__") else set()
    if isinstance(found, ModuleType) and hasattr(found, "__path__"):
        names |= {module.name for module in pkgutil.iter_modules(found.__path__)}
    return names


def _place(error: BaseException) -> str:
    """Return the file and the line of the author's code that raised an error; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OWN_FOLDER, "<frozen "))]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


if __name__ == "__main__":
    main()
