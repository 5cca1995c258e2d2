"""The question whether a trigger can be constructed, and its answer: for a process that is started for one question.

::

    command                               checking process
    -------                               ----------------
    CheckTrigger              ------>
                              <------     TriggerChecked
                              (ends)

Both are msgpack, one struct up to the end of the stream.
"""

from __future__ import annotations

from headgate.protocol.messages import WireStruct

CHECK_ANSWER_BYTES_MAX = 256 * 1024  # of a `TriggerChecked`; its texts have at most `ERROR_CHARS_MAX` characters


class CheckTrigger(WireStruct, frozen=True):
    """Command to checking process: can this trigger be constructed? Answered by `TriggerChecked`.

    ``kwargs`` are encoded by `headgate.protocol.values`; ``import_paths`` are folders, put at the end of sys.path.
    """

    classpath: str
    kwargs: bytes
    import_paths: tuple[str, ...] = ()


class TriggerChecked(WireStruct, frozen=True):
    """Checking process to command: why the trigger cannot be constructed, in one sentence; "" if it can. Not answered.

    ``traceback`` is that of an exception of the author's code.
    """

    problem: str = ""
    traceback: str = ""
