"""A module of authors' classes for the tests of this folder, which is importable while a test runs."""

from __future__ import annotations

import types
from contextlib import suppress

import msgspec

from headgate.protocol.messages.runner import TriggerSpec
from headgate.runner.loading import load_trigger
from headgate.streams.identity import stream_of
from headgate.triggers.base import BaseTrigger

AUTHORS = types.ModuleType("authors_of_tests")


def publish(cls: type[BaseTrigger]) -> str:
    """Make a class importable; return its classpath."""
    setattr(AUTHORS, cls.__name__, cls)
    return f"{AUTHORS.__name__}.{cls.__name__}"


def expected(spec: TriggerSpec) -> TriggerSpec:
    """Return the spec with the stream of the trigger, as if its runner had described it before."""
    with suppress(BaseException):  # a class that cannot be loaded, or has no key, was never described
        stream = stream_of(load_trigger(spec))
        return msgspec.structs.replace(spec, stream="" if stream is None else stream.digest)
    return spec
