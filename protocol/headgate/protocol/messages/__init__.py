"""The messages of both links, the base of their structs, and what the decoders raise."""

from __future__ import annotations

from typing import Final

import msgspec

# All errors that msgspec raises for malformed bytes, bad UTF-8 among them. How deep is too deep depends on the stack
# that the decoder is called on; it counts also what it skips, as a field that a newer peer has appended.
MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WireStruct(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, gc=False):
    """Base of all structs that go over a link.

    A struct travels as a msgpack array, so a new field goes to its end and has a default. It cannot be part of a
    cycle, so the garbage collector need not track it.
    """
