"""What makes the start of a process short: a runner that died is back the sooner."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager


def import_structlog() -> None:
    """Import structlog as if rich were not installed; afterwards rich can be imported as ever.

    structlog imports rich wherever it finds it, for tracebacks that show local variables. headgate prints none of
    those, because they may hold kwargs (I12), and rich would be a quarter of a runner's start. To be called before
    anything else imports structlog; later it does nothing.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    # Documented: None in this place makes the import raise ModuleNotFoundError, which structlog is ready for.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


@contextmanager
def without_collections() -> Generator[None]:
    """Let no garbage collector run meanwhile: imports make hardly anything but what stays, and it would look at all
    of that again and again. What there is afterwards is never looked at again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
