"""Triggers that a supervisor owns: their rows, as it gets them, and what it remembers of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database
from headgate.store.db.verbs import Verbs
from headgate.store.errors import BadKey
from headgate.store.ids import Hold, TryName
from headgate.store.triggers.waiting_tasks import WaitingTask
from headgate.store.triggers.watchers import Feed, feed_of_row


class ClaimedTrigger(msgspec.Struct, frozen=True, gc=False):
    """One trigger a supervisor has to run.

    ``name`` is its watcher's or that of the ``task`` that waits for it, else ``trigger-<id>``. ``kwargs`` are in clear,
    as encoded by `headgate.protocol.values`; None where they cannot be decrypted, and then ``error`` says why.
    ``passed_over`` are the keys of messages that it has failed on too often, the oldest first. ``stream`` is the digest
    of its stream's key: None if it reads none, or if that is not known yet. ``is_task_stream``: its ``task`` takes all
    of its events, not the first one only.
    """

    id: int
    name: str
    classpath: str
    kwargs: bytes | None
    queue: str
    failure_count: int
    error: str = ""
    task: TryName | None = None
    passed_over: tuple[str, ...] = ()
    stream: str | None = None
    hold: Hold | None = None
    is_task_stream: bool = False


class OwnedTrigger(NamedTuple):
    """One trigger that an epoch owns and should be running, as it is stored. A ``watcher`` may be removed by now."""

    id: int
    watcher: str | None
    classpath: str
    encrypted_kwargs: str
    queue: str
    failure_count: int
    asset_id: int | None
    signal_namespace: str | None
    signal_key: str | None
    hold: Hold | None
    stream: str | None


class TriggerVerbs(Verbs):
    """Base of the verbs of triggers: which triggers that were claimed here concern tasks and runs.

    The events of all others cost nothing more because there are tasks.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        # Triggers that a task waits for. No more than this supervisor may own.
        self.waited_for: set[int] = set()
        # Those that are the stream of a task. They are in no other set of tasks' triggers.
        self.task_streams: set[int] = set()
        # The watchers whose events go to an asset, where they may begin runs, or are sent as signals; by trigger.
        self.feeds: dict[int, Feed] = {}
        # Triggers whose rows name a stream.
        self.streamed: set[int] = set()

    def note_claimed(self, rows: Sequence[OwnedTrigger], tasks: Mapping[int, WaitingTask]) -> None:
        """Remember triggers that are owned from now on."""
        streams = {trigger_id for trigger_id, task in tasks.items() if task.is_stream}
        self.task_streams.update(streams)
        # A watcher's trigger keeps its watcher's name and feed, removed or not.
        self.waited_for.update(row.id for row in rows if row.watcher is None and row.id not in streams)
        for row in rows:
            if row.watcher is not None and (row.asset_id, row.signal_key) != (None, None):
                feed = feed_of_row(row.watcher, row.asset_id, row.signal_namespace, row.signal_key)
                self.feeds[row.id] = feed
        self.streamed.update(row.id for row in rows if row.stream is not None)

    def forget(self, trigger_ids: Sequence[int]) -> None:
        """Forget triggers that are not run here any more."""
        self.waited_for.difference_update(trigger_ids)
        self.task_streams.difference_update(trigger_ids)
        self.streamed.difference_update(trigger_ids)
        for trigger_id in trigger_ids:
            self.feeds.pop(trigger_id, None)


def decrypted(
    row: OwnedTrigger, secrets: Secrets, tasks: Mapping[int, WaitingTask], passed_over: Mapping[int, tuple[str, ...]]
) -> ClaimedTrigger:
    """Return the trigger of a row; one that no key decrypts says so, and keeps no other from running (I9)."""
    kwargs, reason = None, ""
    try:
        kwargs = secrets.decrypt(row.encrypted_kwargs)
    except BadKey as error:
        reason = str(error)
    task = None if row.watcher is not None else tasks.get(row.id)
    name = row.watcher or (f"trigger-{row.id}" if task is None else task.name.task)
    # Many triggers have few classes and queues, and a supervisor holds them for as long as it runs.
    classpath, queue = sys.intern(row.classpath), sys.intern(row.queue)
    over = passed_over.get(row.id, ())
    return ClaimedTrigger(
        row.id,
        name,
        classpath,
        kwargs,
        queue,
        row.failure_count,
        reason,
        None if task is None else task.name,
        over,
        row.stream,
        row.hold,
        task is not None and task.is_stream,
    )
