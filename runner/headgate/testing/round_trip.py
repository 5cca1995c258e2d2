"""Serialize a trigger, construct it again as a runner does, and compare the two."""

from __future__ import annotations

import inspect
from typing import Any

from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.runner import TriggerSpec
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.loading import TriggerNotLoaded, load_trigger
from headgate.streams.identity import stream_of
from headgate.tasks.context import Context
from headgate.tasks.maps.operators import MappedOperator
from headgate.testing.failures import RoundTripFailed
from headgate.triggers.base import BaseTrigger
from headgate.triggers.encoding import encode_trigger

SHOWN_CHARS_MAX = 200  # of a value in a failure


def spec_of(trigger: BaseTrigger, trigger_id: int) -> TriggerSpec:
    """Return the spec that the supervisor would store. Raises `RoundTripFailed`."""
    name = type(trigger).__name__
    try:
        classpath, encoded = encode_trigger(trigger)
    except ProtocolError as error:
        raise RoundTripFailed(f"{name} cannot be stored: {error}") from error
    return TriggerSpec(trigger_id, f"run-of-{trigger_id}", name, classpath, encoded, stream=digest_of(trigger))


def digest_of(trigger: BaseTrigger) -> str:
    """Return the digest of the stream of a trigger, "" if it reads none, as the supervisor knows it."""
    stream = stream_of(trigger)
    return "" if stream is None else stream.digest


def loaded(spec: TriggerSpec) -> BaseTrigger:
    """Return the trigger that a runner constructs from the spec. Raises `RoundTripFailed`."""
    name = spec.classpath.rpartition(".")[2]
    try:
        return load_trigger(spec)
    except TriggerNotLoaded as error:
        raise RoundTripFailed(f"{name} cannot be constructed again: {error}") from error
    except Exception as error:
        kwargs = ", ".join(decode_value(spec.kwargs))
        problem = f"{name} cannot be constructed from its kwargs ({kwargs}): {type(error).__name__}: {error}"
        raise RoundTripFailed(problem) from error


def check_round_trip(trigger: BaseTrigger) -> TriggerSpec:
    """Return the spec of a trigger that survives the round trip. Raises `RoundTripFailed`."""
    spec = spec_of(trigger, 1)
    name = type(trigger).__name__
    again = loaded(spec)
    classpath, kwargs_again = again.serialize()
    if classpath != spec.classpath:
        raise RoundTripFailed(f"{name} says it is a {spec.classpath}, and that one says it is a {classpath}")
    _compare_kwargs(name, decode_value(spec.kwargs), kwargs_again)
    if type(again) is type(trigger):
        _compare_attributes(trigger, again, loaded(spec), kwargs_again)
    return spec


def check_start(mapped: MappedOperator, context: Context, encoded: bytes) -> None:
    """Raise `RoundTripFailed` if an instance would give its trigger other arguments than the supervisor has for it.

    The supervisor has what the constructor of the operator does with a value that it does not know.
    """
    try:
        start = mapped.for_step(context).start_trigger_args
    except Exception:
        return  # so does its step
    name, kwargs = mapped.kind.__name__, decode_value(encoded)
    meant = {} if start is None else start.trigger_kwargs or {}
    for key in kwargs.keys() | meant.keys():
        if key not in kwargs or key not in meant or not _are_equal(kwargs[key], meant[key]):
            was, is_ = _shown(kwargs, key), _shown(meant, key)
            raise RoundTripFailed(
                f"the trigger of this {name} begins with {key}={was}, and its constructor makes {is_} "
                f"of the value: without a worker it can only be passed on as it is"
            )


def _compare_kwargs(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in before.keys() | after.keys():
        if key not in before or key not in after or not _are_equal(before[key], after[key]):
            was, is_ = _shown(before, key), _shown(after, key)
            raise RoundTripFailed(f"kwargs[{key!r}] of {name} does not survive the round trip: {was} becomes {is_}")


def _compare_attributes(
    trigger: BaseTrigger, again: BaseTrigger, and_again: BaseTrigger, kwargs: dict[str, Any]
) -> None:
    """Find arguments that `serialize` leaves out, by the attributes with their names.

    Not compared are private attributes that do not have the name of an argument, values that cannot be encoded if
    `serialize` names their argument, and values that differ each time the trigger is constructed.
    """
    name, before, after, later = type(trigger).__name__, vars(trigger), vars(again), vars(and_again)
    arguments = inspect.signature(type(trigger)).parameters.keys()
    for key in before:
        argument = key.removeprefix("_")
        if argument not in arguments and key.startswith("_"):
            continue
        if _is_value(before[key]):
            is_kept = key in after and _are_equal(before[key], after[key])
        else:
            is_kept = argument not in arguments or argument in kwargs or before[key] is after.get(key)
        if not is_kept and _is_steady(after.get(key), later.get(key)):
            was, is_ = _shown(before, key), _shown(after, key)
            raise RoundTripFailed(
                f"{name}.{key} does not survive the round trip: {was} becomes {is_}; does serialize() leave it out?"
            )


def _is_steady(one: object, other: object) -> bool:
    return _are_equal(one, other) if _is_value(one) else one is other


def _is_value(value: object) -> bool:
    try:
        encode_value(value, where="value")
    except ProtocolError:
        return False
    return True


def _are_equal(one: object, other: object) -> bool:
    # The encoding tells apart what == does not, such as 1 and True, and finds a nan equal to itself.
    return _is_value(other) and encode_value(one, where="value") == encode_value(other, where="value")


def _shown(values: dict[str, Any], key: str) -> str:
    return f"{values[key]!r:.{SHOWN_CHARS_MAX}}" if key in values else "nothing"
