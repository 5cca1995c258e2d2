"""Judges what consumers were handed over: each event once, in commit order, and none left out.

The events of one trigger are in commit order if their rows are in that of their ids, because here is one writer at a
time. What it looks for, by name:

- ``handed over twice``: an event is in the user's table twice for one consumer
- ``handed over out of order``: before an earlier event of its trigger, or an event of an earlier trigger of the name
- ``skipped``: a later event was handed over, or the consumer was told that there is nothing more
- ``handed over otherwise``: not what was stored, or not by the consumer's watcher
- ``set aside too early``: an event that was not refused alone often enough
- ``tried again and again``: an event that was refused alone too often, and not set aside

An event that was set aside is handed over when a user asks for it, out of order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from tests.proof.simulation.records import AskedFor, Caught, Logged, NotTaken, SetAside, Stored, Taken
from tests.proof.simulation.scenario import Consuming

Place = tuple[int, int]  # a trigger, and a row of the log


class ConsumerBooks:
    """What is known of the log and of the tables of users. ``find`` takes a kind and a text."""

    def __init__(self, find: Callable[[str, str], None], plans: Mapping[str, Consuming]) -> None:
        self._find = find
        self._plans = plans  # by consumer
        self._triggers: dict[int, int] = {}  # by row of the log
        self._stored: dict[Place, Stored] = {}
        self._taken: defaultdict[str, dict[Place, None]] = defaultdict(dict)  # by consumer, in their order
        self._aside: defaultdict[str, dict[Place, str]] = defaultdict(dict)  # the state, by consumer
        self._refused: Counter[tuple[str, int]] = Counter()  # by consumer and row, of events that were alone
        self._unsure: Counter[str] = Counter()  # by consumer: deaths, of which each may count as a refusal, or not
        self._requests: Counter[str] = Counter()

    def take(self, record: Stored | Logged | Taken | NotTaken | SetAside | AskedFor | Caught) -> None:
        """Judge the next record."""
        match record:
            case Logged():
                self._triggers[record.row] = record.trigger_id
            case Stored():
                if self._plans:
                    self._stored[self._triggers[record.row], record.row] = record
            case Taken():
                self._see_taken(record)
            case NotTaken():
                self._see_not_taken(record)
            case SetAside():
                self._see_set_aside(record)
            case AskedFor():
                self._requests[record.consumer] += 1
            case Caught():
                for place in self._missing(record.consumer):
                    self._find("skipped", f"{place} by {record.consumer}, which is at the end")
                for place in self._aside[record.consumer].keys() - self._taken[record.consumer].keys():
                    self._find("skipped", f"{place} by {record.consumer}, which had set it aside")

    def _see_taken(self, record: Taken) -> None:
        place, taken = (record.trigger_id, record.row), self._taken[record.consumer]
        what = f"{place} by worker {record.worker} of {record.consumer}"
        stored = self._stored.get(place)
        if stored is None or (stored.key, stored.handout) != (record.key, record.handout):
            self._find("handed over otherwise", what)
        elif stored.trigger != self._plans[record.consumer].watcher:
            self._find("handed over otherwise", f"{what}, which is of {stored.trigger}")
        in_order = [other for other in taken if other not in self._aside[record.consumer]]
        is_aside = place in self._aside[record.consumer]
        if place in taken:
            self._find("handed over twice", what)
        elif not is_aside and in_order and place < in_order[-1]:
            self._find("handed over out of order", what)
        taken.setdefault(place)
        for other in self._missing(record.consumer):
            if other < place and not is_aside:
                self._find("skipped", f"{other} before {what}")

    def _see_not_taken(self, record: NotTaken) -> None:
        plan = self._plans[record.consumer]
        if record.has_died:
            self._unsure[record.consumer] += 1
        elif len(record.rows) == 1:
            self._refused[record.consumer, record.rows[0]] += 1
            # One request for those that were set aside is one more try. A process that dies while it counts a try has
            # not counted it.
            tries_max = plan.max_deliveries + self._requests[record.consumer] + self._unsure[record.consumer]
            if plan.max_deliveries and self._refused[record.consumer, record.rows[0]] > tries_max:
                self._find("tried again and again", f"{record.rows[0]} by {record.consumer}")

    def _see_set_aside(self, record: SetAside) -> None:
        place, aside = (record.trigger_id, record.row), self._aside[record.consumer]
        if place not in aside:
            refused = self._refused[record.consumer, record.row] + self._unsure[record.consumer]
            if refused < self._plans[record.consumer].max_deliveries or not self._plans[record.consumer].max_deliveries:
                self._find("set aside too early", f"{place} by {record.consumer}, after {refused} refusals")
        aside[place] = record.state

    def _missing(self, consumer: str) -> list[Place]:
        """Return the events of the watcher that the consumer has neither had nor set aside."""
        had, watcher = {*self._taken[consumer], *self._aside[consumer]}, self._plans[consumer].watcher
        return [place for place, row in self._stored.items() if row.trigger == watcher and place not in had]
