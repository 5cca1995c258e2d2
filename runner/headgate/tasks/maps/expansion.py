"""Over what a task, or a group of tasks, is expanded: the values, and the limits that its author has set."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

from headgate.child.error_text import storable
from headgate.child.queries import secrets
from headgate.protocol.errors import ValueNotSerializable
from headgate.protocol.messages.dags import NAME_CHARS_MAX
from headgate.protocol.messages.maps import DEFAULT_WINDOW, Elements, MapSpec, Output, digest_of
from headgate.protocol.messages.start_triggers import OWN_BYTES_MAX, Listed, OwnSource
from headgate.protocol.values import encode_value
from headgate.tasks.context import Context
from headgate.tasks.maps.sources import Combinations, Given, Mappable, function_problem, mappable, source_digest
from headgate.tasks.maps.worklists import Appends, Worklist
from headgate.tasks.operator import XComArg
from headgate.tasks.operators import outputs_in
from headgate.tasks.options import NAMES
from headgate.triggers.airflow_names import OPTIONS

COMPARED_MAX: Final = 1000  # values that stand in the file and are also compared in any order
RANGE_LISTED_MAX: Final = 100_000  # a longer range is compared by its ends, and begins with workers
InstanceNamer: TypeAlias = Callable[..., Any]
OF_TASK: Final = frozenset({*NAMES, "task_id", "dag"})  # the same for all instances of a task
_LIMITS: Final[tuple[tuple[str, tuple[type[Any], ...]], ...]] = (
    ("window", (int,)),
    ("fail_fast", (bool,)),
    ("failures_max", (int, type(None))),
)


class Expansion:
    """The arguments of ``expand``, or of ``expand_kwargs``: then ``over`` is None, and ``over_kwargs`` has dicts.

    ``what`` names it in errors. Raises TypeError and ValueError for arguments that it cannot be expanded over.
    """

    def __init__(
        self,
        what: str,
        *,
        over: Mapping[str, Any] | None,
        over_kwargs: Any = None,
        window: int = DEFAULT_WINDOW,
        fail_fast: bool = False,
        failures_max: int | None = None,
        map_index_name: InstanceNamer | None = None,
    ) -> None:
        self._what = what
        self.names = None if over is None else tuple(over)
        self.values = _read(over, over_kwargs)
        for (name, kinds), value in zip(_LIMITS, (window, fail_fast, failures_max), strict=True):
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise TypeError(f"{name} must be {' or '.join(one.__name__ for one in kinds)}, not {value!r:.100}")
        if map_index_name is not None and (problem := function_problem(map_index_name)) is not None:
            raise TypeError(f"map_index_name: {problem}")
        self._limits = (window, fail_fast, failures_max)
        self._namer = map_index_name
        self._worklists = [leaf for leaf in self.values.leaves() if isinstance(leaf, Worklist)]

    def spec(self) -> MapSpec:
        """Return it for the supervisor."""
        return MapSpec(self.values.source(), *self._limits, given_digest=self._given_digest)

    @cached_property
    def _given_digest(self) -> str:
        """Return digests of the lists in the file, of their values in any order, and of the file; "" if there is none.

        See `_are_others`. Of very many values that in any order is left out.
        """
        lists = [found for leaf in self.values.leaves() if (found := leaf.in_file())]
        if not lists:
            return ""
        in_any_order = ""
        if sum(map(len, lists)) <= COMPARED_MAX:
            in_any_order = digest_of(sorted(_encoded(value) for one in lists for value in one))
        return f"{digest_of(map(_encoded_list, lists))}.{in_any_order}.{source_digest.get()}"

    def mapped_over(self) -> Iterator[XComArg]:
        """Yield the outputs whose items are values."""
        return (leaf for leaf in self.values.leaves() if isinstance(leaf, XComArg))

    def outputs(self) -> Iterator[XComArg]:
        """Yield the outputs that the values are made of, also those within lists of the file."""
        for leaf in self.values.leaves():
            if not isinstance(leaf, Given):
                yield from outputs_in(leaf)
            elif not isinstance(leaf.given, range):
                yield from outputs_in(list(leaf.given))

    def bind(self, task_id: str) -> None:
        """Have what is appended to a worklist belong to the task ``task_id``. Raises ValueError."""
        for worklist in self._worklists:
            worklist.bind(task_id)

    def appends(self) -> Appends | None:
        """Return what takes the values that a step appends; None if it may append none."""
        return next((worklist.appends() for worklist in self._worklists), None)

    def check_in_trigger(self) -> None:
        """Raise ValueError if the value of an instance is not known without a worker, which the trigger may need."""
        values = self.values.alone if isinstance(self.values, Combinations) else None
        if values is None:
            found = "by expand_kwargs()" if self.names is None else f"over {len(self.names)} parameters"
        elif isinstance(values, Given):
            found = "over a list with outputs of tasks" if next(self.outputs(), None) is not None else ""
        elif isinstance(values, XComArg) and isinstance(values.source(), Output | Elements):
            found = f"over the mapped task {values.operator.task_id!r}" if values.operator.is_mapped else ""
        else:
            found = f"over {type(values).__name__}"
        if found:
            raise ValueError(
                f"cannot begin in its trigger, because it is expanded {found}: without a worker, a value is known only "
                f"of one parameter over a list, over what one task leaves or over its elements, as they are"
            )

    def source_in_trigger(self) -> OwnSource:
        """Return where the supervisor finds the values for triggers. Raises `ValueNotSerializable`, `ValueTooLong`."""
        assert isinstance(self.values, Combinations)
        values = self.values.alone
        if isinstance(values, Given):
            given = enumerate(values.given)
            return Listed(tuple(encode_value(each, where=f"value {at}", bytes_max=OWN_BYTES_MAX) for at, each in given))
        assert values is not None
        source = values.source()
        assert isinstance(source, Output | Elements)
        return source

    def own(self, context: Context) -> dict[str, Any]:
        """Return the arguments that this instance has of its own, and give it its name.

        Raises RuntimeError if there are not the values over which it was expanded, and what the author's functions
        raise.
        """
        instance = context["ti"]
        index, counted = instance.map_index, instance.map_length
        values = self.values.values(context)
        length = len(values)
        if index >= length or (counted is not None and length != counted):
            # A value is found by its place: among others than were counted it may be that of another instance.
            was = "" if counted is None else f"; it was expanded over {counted:,}"
            what = "it together with what it is expanded over" if any(self.mapped_over()) else "the whole task"
            raise RuntimeError(
                f"there are {length:,} values for {self._what} now, and this is instance {index}{was}: clear {what}"
            )
        if instance.given_digest and _are_others(instance.given_digest, self._given_digest):
            raise RuntimeError(
                f"the values for {self._what} in the DAG file are not those that it was expanded over, or not in this "
                f"order. Each step makes them anew, so they must have the same order each time: a set has none. "
                f"If the file was changed, clear the whole task, or only this instance if its value is still at "
                f"index {index}"
            )
        value = values[index]
        own = dict(zip(self.names, value, strict=True)) if self.names is not None else _arguments(index, value)
        instance.map_name = self._name_of(own)
        return own

    def given_names(self) -> Iterator[tuple[str, ...]]:
        """Yield the names of the arguments that instances have of their own, as far as the file has them.

        Raises TypeError for a value of expand_kwargs() that is no dict of arguments.
        """
        if self.names is not None:
            yield self.names
        elif isinstance(self.values, Given):
            dicts = [value for value in self.values.given if not isinstance(value, XComArg)]
            for value in dicts:
                if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                    raise TypeError(f"expand_kwargs(): dicts of arguments are needed, not {value!r:.100}")
            yield from dict.fromkeys(tuple(value) for value in dicts)

    def check_namer(self, own: tuple[str, ...]) -> None:
        """Raise TypeError if `map_index_name` cannot be called with these arguments of an instance."""
        if self._namer is None:
            return
        try:
            inspect.signature(self._namer).bind(**wanted(self._namer, dict.fromkeys(own)))
        except TypeError as error:
            there = ", ".join(own)
            raise TypeError(f"map_index_name gets the arguments of an instance ({there}): {error}") from None
        except ValueError:
            raise TypeError(f"map_index_name: a plain function is needed, not {self._namer!r:.100}") from None

    def _name_of(self, own: Mapping[str, Any]) -> str | None:
        """Return the name of the instance with these arguments of its own; None if it has none."""
        if self._namer is None:
            return None
        try:
            name = self._namer(**wanted(self._namer, own))
            text = "" if name is None else " ".join(str(name).split())
        except KeyboardInterrupt:
            raise
        except BaseException:  # a name is not worth a try
            logging.getLogger(__name__).warning("map_index_name has failed: the instance has no name", exc_info=True)
            return None
        return storable(secrets.hide(text))[:NAME_CHARS_MAX] or None


def _are_others(before: str, now: str) -> bool:
    """Whether the values in the file may be at other places than when the task was expanded over them.

    Other values of the same file are those that follow the calendar, as the last seven days do: then each step of a run
    has the same ones, but around midnight. The same values in another order are those of a set.
    """
    (order, values, file), (order_now, values_now, file_now) = before.split("."), now.split(".")
    return order != order_now and (file != file_now or values == values_now)


def _encoded_list(given: Sequence[Any]) -> bytes:
    is_long = isinstance(given, range) and len(given) > RANGE_LISTED_MAX
    return repr(given).encode() if is_long else _encoded(list(given))


def _encoded(value: Any) -> bytes:
    try:
        return encode_value(value, where="the value")
    except ValueNotSerializable:
        return encode_value(_comparable(value), where="the value")


def _comparable(value: Any) -> Any:
    """Return a value in a form in which it can be compared with what it was: the output of a task by its name.

    Of a part that has no stored form only its type is compared.
    """
    if isinstance(value, XComArg):
        return ["output", value.operator.task_id, value.key]
    if type(value) in (list, tuple):
        return [_comparable(part) for part in value]
    if type(value) is dict:
        return [[_comparable(key), _comparable(part)] for key, part in value.items()]
    try:
        encode_value(value, where="the value")
    except ValueNotSerializable:
        return type(value).__qualname__
    return value


def wanted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the named arguments that a function has parameters for. Raises ValueError as `inspect` does."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: given[name] for name in parameters if name in given}


def _read(over: Mapping[str, Any] | None, over_kwargs: Any) -> Mappable:
    if over is None:
        return _mappable("expand_kwargs()", over_kwargs)
    if not over:
        raise TypeError("expand() needs the name of a parameter, with the values for it")
    return Combinations([_mappable(f"expand({name}=...)", value, name) for name, value in over.items()])


def _mappable(where: str, value: Any, name: str = "") -> Mappable:
    try:
        return mappable(value)
    except TypeError as error:
        instead = f"; instead of the option of Airflow's: {OPTIONS[name]}" if name in OPTIONS else ""
        raise TypeError(f"{where}: {error}{instead}") from None


def _arguments(index: int, value: object) -> dict[str, Any]:
    """Return the arguments that an instance gets from expand_kwargs(). Raises TypeError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"expand_kwargs needs dicts of arguments; the value {index} is {value!r:.100}")
    return dict(value)
