"""The messages of both links, and the base of their structs."""

from __future__ import annotations

import msgspec


class WireStruct(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, gc=False):
    """Base of all structs that go over a link.

    A struct travels as a msgpack array, so a new field goes to its end and has a default. It cannot be part of a
    cycle, so the garbage collector need not track it.
    """
