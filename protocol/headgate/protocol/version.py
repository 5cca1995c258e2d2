"""The version of headgate, for the package's metadata and for `Hello`; importing it is faster than reading metadata."""

from __future__ import annotations

VERSION = "0.1.0"
