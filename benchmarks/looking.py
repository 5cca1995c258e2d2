"""``headgate``, whose supervisor is woken by no bell: it looks by itself whether others have written.

::

    python -m benchmarks.looking up

It is what a supervisor does where no bell can be hung up, and so the baseline of those that are woken.
"""

from __future__ import annotations

from headgate.cli.main import main
from headgate.store.db import changes


def take_bells_down() -> None:
    """Have the listeners of both databases say that they have to be asked every now and then."""
    changes._Rings.no_bell = changes._Notifications.no_bell = "the benchmark has it look"


if __name__ == "__main__":
    take_bells_down()
    main()
