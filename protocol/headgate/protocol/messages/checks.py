"""Questions about a trigger, and their answers: for a process that is started for one question.

::

    command                               checking process
    -------                               ----------------
    CheckTrigger              ------>
                              <------     TriggerChecked
    or CheckBroker            ------>
                              <------     BrokerChecked
                              (ends)

Both are msgpack, one struct up to the end of the stream.
"""

from __future__ import annotations

from headgate.protocol.messages import WireStruct

OTHERS_MAX = 200  # triggers that one is held against
CHECK_ANSWER_BYTES_MAX = 256 * 1024  # of a `TriggerChecked`; its texts have at most `ERROR_CHARS_MAX` characters


class OtherTrigger(WireStruct, frozen=True):
    """A trigger that there is already, by the name of its watcher; part of `CheckTrigger`."""

    name: str
    classpath: str
    kwargs: bytes


class CheckTrigger(WireStruct, frozen=True, tag=True):
    """Command to checking process: can this trigger be constructed? Answered by `TriggerChecked`.

    ``kwargs`` are encoded by `headgate.protocol.values`; ``import_paths`` are folders, put at the end of sys.path.
    ``others`` may read the same stream.
    """

    classpath: str
    kwargs: bytes
    import_paths: tuple[str, ...] = ()
    others: tuple[OtherTrigger, ...] = ()


class TriggerChecked(WireStruct, frozen=True):
    """Checking process to command: why the trigger cannot be constructed, in one sentence; "" if it can. Not answered.

    ``traceback`` is that of an exception of the author's code. ``notes`` name those of the others that read the same
    stream and would open it otherwise, a sentence each.
    """

    problem: str = ""
    traceback: str = ""
    notes: tuple[str, ...] = ()


class CheckBroker(WireStruct, frozen=True, tag=True):
    """Command to checking process: can this trigger read its broker, and what of it is dangerous?

    Answered by `BrokerChecked`. ``connection`` is the URI of the connection that its kwargs name.
    """

    classpath: str
    kwargs: bytes
    connection: str


class BrokerChecked(WireStruct, frozen=True):
    """Checking process to command: what was found, in sentences. Not answered.

    ``problem``: why the source cannot be read; "" if it can. ``warnings``: which of its settings may lose messages.
    ``lag``: how many messages the broker has; None if that is unknown.
    """

    name: str = ""
    problem: str = ""
    warnings: tuple[str, ...] = ()
    lag: int | None = None


Check = CheckTrigger | CheckBroker
