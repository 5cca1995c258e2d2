"""Servers that a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(message: str) -> NoReturn:
    """Skip the test for want of a server; fail it where ``CI`` is set."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
