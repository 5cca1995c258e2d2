"""``python -m headgate.cli`` is ``headgate``."""

from __future__ import annotations

import sys

from headgate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
