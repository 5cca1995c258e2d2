"""What a scenario says of runs for signals: the schedule of a DAG, and a user who ends all of its runs at last."""

from __future__ import annotations

import json

from tests.proof.simulation.scenario import Part

from headgate.protocol.messages.rules import rule_name
from headgate.protocol.messages.schedules import RunContract
from headgate.signals.rules import OnSignal, equal
from headgate.tasks.schedule import Batch, Each, Latest, Schedule


class OnKey(Part, frozen=True):
    """A signal under ``key`` counts, if it has this value, as the text of its JSON; None: with any."""

    key: str
    value: str | None = None

    def on_signal(self) -> OnSignal:
        """Return it as an author writes it."""
        return OnSignal(self.key, None if self.value is None else equal(json.loads(self.value)))

    @property
    def name(self) -> str:
        """What the database has for it."""
        return rule_name(self.on_signal().to_rule())


class RunsOn(Part, frozen=True):
    """The schedule of a DAG: a run for signals, by the contract; ``count`` and ``seconds`` are those of batches."""

    rules: tuple[OnKey, ...]
    contract: RunContract = "each"
    count: int = 0
    seconds: float | None = None

    def schedule(self) -> Schedule:
        """Return it as an author writes it."""
        signals = [rule.on_signal() for rule in self.rules]
        match self.contract:
            case "each":
                return signals[0] if len(signals) == 1 else Each(signals)
            case "batch":
                return Batch(signals, self.count, self.seconds)
            case "latest":
                return Latest(signals)
            case _:
                return signals


class EndsAll(Part, frozen=True):
    """A user ends all runs of a DAG, again and again from then on, until there are none and none are to come."""

    at: float
    dag: str
