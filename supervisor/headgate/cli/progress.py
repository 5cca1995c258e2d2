"""The progress of a command that takes long: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time

from headgate.cli.output import console

PROGRESS_INTERVAL_S = 0.2  # between two updates of the bar: a terminal shows no more, and an item takes far less
PROGRESS_LINE_INTERVAL_S = 5.0  # between two lines of progress if there is no terminal


class ProgressShown:
    """How many of ``total`` items are done, on standard error; ``verb`` and ``noun`` are as in "replayed 5 frames".

    ``seconds`` is how long it took, once the block has ended.
    """

    def __init__(self, verb: str, noun: str, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._out = console(stderr=True)
        self._verb = verb
        self._noun = noun
        self._total = total
        self._bar = Progress(
            TextColumn(verb),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._out,
            transient=True,
            disable=not self._out.is_terminal,
        )
        self._task = self._bar.add_task(verb, total=total)
        self._show_at = 0.0
        self._started_at = 0.0
        self.seconds = 0.0

    def __enter__(self) -> ProgressShown:
        self._started_at = time.monotonic()
        self._show_at = self._started_at + self._interval_s
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self.seconds = round(time.monotonic() - self._started_at, 3)

    @property
    def _interval_s(self) -> float:
        return PROGRESS_INTERVAL_S if self._out.is_terminal else PROGRESS_LINE_INTERVAL_S

    def update(self, done: int) -> None:
        """Show that so many items are done, unless something was shown a moment ago."""
        now = time.monotonic()
        if now < self._show_at:
            return
        self._show_at = now + self._interval_s
        if self._out.is_terminal:
            self._bar.update(self._task, completed=done)
        else:
            per_s = done / (now - self._started_at)
            of = f"{done:,} of {self._total:,} {self._noun}"
            self._out.print(f"{self._verb} {of}, {per_s:,.0f} a second", markup=False)
