"""The benchmarks are a package beside the tests, imported by its whole name, wherever pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
