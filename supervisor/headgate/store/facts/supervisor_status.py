"""What supervisors publish about themselves, for the commands and pages of other processes.

A supervisor may be newer than who reads: fields that are not known here are passed over, words of its own are shown as
they are, and what cannot be read at all is said to be so, with the reason, beside everything else that can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import insert, select, update

from headgate.protocol.messages.runner import RunnerFigures, StallReason
from headgate.scheduling.why import DagFolder, RunnerEnds
from headgate.store.db.bulk import chunks
from headgate.store.db.fact_tables import STATUS_CHARS_MAX
from headgate.store.db.transaction import Tx
from headgate.store.ids import Epoch
from headgate.store.tables import supervisor_status, triggerer


class StreamStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a shared stream is, as its runner says: `headgate.protocol.messages.runner.StreamFigures` has the meanings.

    ``stream`` is the digest of its key. Times are seconds since 1970. ``lag_unit`` and ``held`` are the words of the
    supervisor's version.
    """

    stream: str
    in_flight: int = 0
    queued: int = 0
    lanes: int = 0
    online: int = 0
    absent: int = 0
    lag: int | None = None
    lag_unit: str = "messages"
    held: str | None = None
    held_since: float | None = None
    held_by: tuple[int, ...] = ()
    oldest_at: float | None = None
    acked: int = 0
    failed: int = 0
    rejected: int = 0
    ended: int = 0
    last_error: str = ""
    last_error_at: float | None = None


class SupervisorStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a supervisor says of itself. ``runner`` is the state of its runner, and ``incarnation`` the number of it.

    ``running``, ``held`` and ``owned`` are triggers, ``steps`` those of tasks that its workers have. ``streams`` are as
    many as there is room for, those first that are held or have most in flight; ``streams_in_all`` is the number of
    all. ``trouble``: the duty for which it cannot use the database, though it can for others, and why; "" if it can.
    ``passed_over``: what its scheduler passes over for a while, because it has failed, and why, each; they are the
    first of ``passed_over_in_all``. ``runner_ends`` is None if no runner has ended of late without being asked to, and
    ``dag_folder`` if it runs no tasks, or has not parsed all of its files.
    ``is_draining``: it has been asked to stop, and claims nothing any more. ``logs_trouble``: why it cannot write logs
    of tasks; "" if it can.
    """

    runner: str = "absent"
    incarnation: int = 0
    owned: int = 0
    running: int = 0
    held: int = 0
    steps: int = 0
    streams: tuple[StreamStatus, ...] = ()
    streams_in_all: int = 0
    trouble: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    passed_over_in_all: int = 0
    runner_ends: RunnerEnds | None = None
    dag_folder: DagFolder | None = None
    is_draining: bool = False
    logs_trouble: str = ""

    def runner_told(self) -> str:
        """Return how its runner is, in words."""
        return runner_told(self.runner, self.runner_ends)

    def passed_over_told(self) -> str:
        """Return what is passed over, and why, in words; "" if nothing is."""
        if not self.passed_over:
            return f"{self.passed_over_in_all:,} with names that are too long" if self.passed_over_in_all else ""
        name, error = self.passed_over[0]
        more = f" (and {self.passed_over_in_all - 1:,} more)" if self.passed_over_in_all > 1 else ""
        return f"the {name}{more}: {error}"


def runner_told(state: str, ends: RunnerEnds | None) -> str:
    """Return the state of a runner, and how often runners have ended of late, if any has, in words."""
    return state if ends is None else f"{state}; {ends}"


class PublishedStatus(msgspec.Struct, frozen=True):
    """The status of a supervisor. It has been so since ``at``, and still was at its last heartbeat, ``as_of``.

    ``unreadable``: why nothing of it could be read; ``status`` says nothing then.
    """

    at: datetime
    as_of: datetime
    status: SupervisorStatus
    unreadable: str | None = None


_BROKER_AWAY: Final[StallReason] = "broker away"
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(SupervisorStatus)


def streams_of(figures: RunnerFigures) -> tuple[StreamStatus, ...]:
    """Return what a runner says of its streams, without their names: the table of streams has these."""
    return tuple(msgspec.convert(stream, StreamStatus, from_attributes=True) for stream in figures.streams)


def encode_status(status: SupervisorStatus) -> str:
    """Return a status as it is stored: with fewer streams, and fewer of what is passed over, if they do not fit."""
    while len(encoded := _ENCODER.encode(status)) > STATUS_CHARS_MAX:
        streams, over = status.streams, status.passed_over
        assert streams or over, "all else has a limit"
        if len(_ENCODER.encode(over)) > STATUS_CHARS_MAX // 2 or not streams:
            status = msgspec.structs.replace(status, passed_over=over[: len(over) * 3 // 4])
        else:
            status = msgspec.structs.replace(status, streams=streams[: len(streams) * 3 // 4])
    return encoded.decode()


def publish(tx: Tx, epoch: Epoch, figures: str) -> None:
    """Store what a supervisor says of itself, in place of what it said before."""
    changed = {"at": tx.now, "figures": figures}
    row = update(supervisor_status).where(supervisor_status.c.triggerer_id == epoch).values(changed)
    if tx.connection.execute(row).rowcount == 0:
        tx.connection.execute(insert(supervisor_status).values(triggerer_id=epoch, **changed))


def published(tx: Tx, triggerer_ids: Collection[int]) -> dict[int, PublishedStatus]:
    """Return what these supervisors say of themselves, by their ids; those that have said nothing are left out."""
    found = {}
    for ids in chunks(sorted(triggerer_ids)):
        rows = select(supervisor_status, triggerer.c.latest_heartbeat).join(triggerer)
        for row in tx.connection.execute(rows.where(supervisor_status.c.triggerer_id.in_(ids))):
            as_of = max(row.at, row.latest_heartbeat)
            found[row.triggerer_id] = PublishedStatus(row.at, as_of, *_read(row.triggerer_id, row.figures))
    return found


def brokers_away(tx: Tx, said: Mapping[int, PublishedStatus]) -> dict[tuple[int, str], tuple[float, str]]:
    """Return for how many seconds brokers have been away, and why, by the supervisor that says so and the stream."""
    return {
        (epoch, one.stream): (max(0.0, tx.now.timestamp() - one.held_since), one.last_error)
        for epoch, each in said.items()
        for one in each.status.streams
        if one.held == _BROKER_AWAY and one.held_since is not None
    }


def _read(triggerer_id: int, figures: str) -> tuple[SupervisorStatus, str | None]:
    try:
        return _DECODER.decode(figures), None
    except msgspec.MsgspecError as error:
        problem = (
            f"the figures of supervisor {triggerer_id} cannot be read ({error}): "
            f"it may run another version of headgate; use the same one here"
        )
        return SupervisorStatus(runner="unknown"), problem
