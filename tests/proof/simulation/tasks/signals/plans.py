"""What a scenario says of signals: who sends, who waits, who listens, and what users do to the log."""

from __future__ import annotations

import json

from tests.proof.simulation.scenario import Part
from tests.proof.simulation.tasks.records import SaidSignal
from tests.proof.simulation.tasks.signals.rules.plans import Asks, EndsRun, Ruled
from tests.proof.simulation.tasks.signals.runs.plans import EndsAll

from headgate.protocol.messages.signals import SignalSend, Since
from headgate.signals import SignalService

A_USER = "a user"  # who sends, beside steps and triggers; and the verb of all that users do to the log
FEED_BYTES_MAX = 200  # of an event that is a signal as it is; elsewhere that is more
LONG_BYTES = 400  # of the payload of an event that is longer than a signal may be, in the simulation


class Send(Part, frozen=True):
    """A signal to be sent. ``value`` is the text of its JSON; without a ``dedup`` it gets one of its own."""

    key: str
    value: str
    dedup: str = ""
    of_run: bool = False


class Sensor(Part, frozen=True):
    """The wait of a task: for ``value``, as the text of its JSON, or for any signal (None)."""

    key: str
    value: str | None = None
    since: Since = "run"
    timeout_s: float = 30.0
    soft_fail: bool = False


class Listens(Part, frozen=True):
    """A step listens from ``after`` on, or for the one ``version``, and wants no more than ``most`` signals.

    ``watches``: it does so with a watcher.
    """

    key: str
    after: int | None = None
    version: int | None = None
    timeout_s: float = 1.5
    most: int = 100
    watches: bool = False


class OfSignals(Part, frozen=True):
    """What a task does: it is a ``sensor``; or its first step sends ``now`` at once, ``listens``, and sends ``then``.

    ``ruled`` are rules that start and stop it. ``together``: those of ``now`` are one call, and so those of ``then``.
    ``with_outcome`` are sent with the outcome of each leg, by its number.
    """

    sensor: Sensor | None = None
    now: tuple[Send, ...] = ()
    listens: Listens | None = None
    then: tuple[Send, ...] = ()
    together: bool = False
    with_outcome: tuple[tuple[Send, ...], ...] = ()
    ruled: Ruled | None = None

    def send_with_outcome(self, leg: int) -> None:
        """Have the signals of a leg sent with its outcome, as the code of an author does."""
        for one in self.with_outcome[leg] if leg < len(self.with_outcome) else ():
            value = json.loads(one.value)
            SignalService().send_signal(one.key, value, dedup=one.dedup or None, of_run=one.of_run, with_outcome=True)


class UserSends(Part, frozen=True):
    """A user sends these in one transaction at ``at``; ``unsure`` times without hearing of it, and then once more.

    ``run``: those that say so are for this run alone. ``start``: with a run of this DAG, unless one is open.
    """

    at: float
    sends: tuple[Send, ...]
    run: str = ""
    unsure: int = 0
    start: str = ""


class UserPuts(Part, frozen=True):
    """A user puts an event of a watcher into the log."""

    at: float
    watcher: str


class Forgets(Part, frozen=True):
    """A user forgets a key."""

    at: float
    key: str


class Cleans(Part, frozen=True):
    """A user cleans the log of all that is older than so many seconds."""

    at: float
    older_than_s: float


UserAct = UserSends | UserPuts | Forgets | Cleans | Asks | EndsRun | EndsAll


class Watcher(Part, frozen=True):
    """A watcher whose events are signals under a key: so many, each after ``gap_s``, and the ``long`` ones are long.

    Beside each of them its trigger sends a signal by itself under the key ``sends``, if there is one.
    """

    name: str
    key: str
    count: int
    gap_s: float
    long: tuple[int, ...] = ()
    sends: str = ""

    def payload(self, number: int) -> dict[str, int | str]:
        """Return the payload of an event."""
        payload: dict[str, int | str] = {"watcher": self.name, "number": number}
        return payload | {"padding": "." * LONG_BYTES} if number in self.long else payload


class Limits(Part, frozen=True):
    """The limits of the log, which are lower here than elsewhere, so that a few signals reach them.

    ``kept`` versions of a key, ``page`` of them read for a wait at once, ``heard`` by a listener, ``waits`` looked at
    in one transaction.
    """

    kept: int = 10_000
    page: int = 20
    heard: int = 1000
    waits: int = 500


def said_of(signal: SignalSend) -> SaidSignal:
    """Return how the journal names a signal."""
    return SaidSignal(signal.key, signal.dedup, signal.value.decode(), signal.is_of_run)


def canonical(value: str) -> str:
    """Return the text of a JSON value with its keys in order: equal values have the same one."""
    return json.dumps(json.loads(value), sort_keys=True)
