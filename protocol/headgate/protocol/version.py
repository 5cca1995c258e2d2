"""The version of this headgate: the package's metadata takes it from here, and a runner need not go and look for it."""

from __future__ import annotations

VERSION = "0.1.0"
