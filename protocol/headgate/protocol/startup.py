"""Faster start of processes, so that a dead runner is replaced sooner."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager


def import_structlog() -> None:
    """Import structlog as if rich were not installed; afterwards rich can be imported as usual.

    structlog imports rich if it is installed, for tracebacks that show local variables. headgate prints none of those,
    because they may contain kwargs (I12), and rich would take a quarter of a runner's start. Call this before anything
    else imports structlog; later it does nothing.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    # As documented, None here makes the import raise ModuleNotFoundError, which structlog handles.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


@contextmanager
def without_collections() -> Generator[None]:
    """Turn the garbage collector off inside the block, and exempt what exists at its end from collection for good.

    Nearly everything that imports create stays, so the collector would scan it again and again for nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
