"""Redis Streams: a stream that a consumer group reads, each entry acknowledged once it is stored.

The promise, in the words of ``docs/brokers.md``: **every entry that the group gets is stored once**, for each watcher,
whatever dies, as long as the server does not lose it. An entry is acknowledged (``XACK``) after everything derived from
it is stored, and is known by its id and its content, which a server never changes. By default entries are handed out
and acknowledged in the order of their ids; if a subscriber fails on one, that one comes again with all behind it.

What the promise does not cover is reported, never passed in silence:

- *Entries trimmed before they were read* (``MAXLEN``, ``XTRIM``) are gone: they are counted and logged as an error.
- *Entries trimmed after they were handed out, and before they were stored*, become dead letters that name their id.
- *A server that crashes* loses what it has not synced to its disk; one without an append-only file is warned of.
  A fail-over can lose acknowledgements (the entries come again, and are recognised) and entries.
- *A server that evicts* any key when its memory is full, and a stream that expires, are refused.

A consumer group remembers by consumer name what it has handed out. All runners of a stream read under one name,
``consumer``, so a runner that takes over reads what the last one has left at once. Two programs that read for one group
need different names.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from headgate.brokers.broker_errors import BrokerSourceMissing
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name
from headgate.brokers.clients.bodies import parsed_json
from headgate.brokers.clients.redis_client import (
    TROUBLE,
    Fields,
    RedisClient,
    RedisFull,
    RedisPipeline,
    WatchError,
    ask,
    fields_as_they_are,
    named_fields,
    open_client,
    pairs_of,
    run,
    translated,
)
from headgate.brokers.threaded import (
    HEAD_BYTES_MAX,
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMisconfigured,
    PlaceRefuses,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import LanePosition, Undecodable

__all__ = ["RedisStreamProducer", "RedisStreamTrigger"]

VERSION_MIN: Final = (6, 2)  # which has XAUTOCLAIM
CONSUMER: Final = "headgate"
CLAIM_INTERVAL_S_MIN: Final = 1.0
MOVE_ATTEMPTS_MAX: Final = 20  # to copy one rejected entry while others write to the same stream
PING_INTERVAL_S: Final = 1.0  # while as many entries are in flight as may be

_log = structlog.get_logger("headgate.brokers.redis")


class RedisStreamProducer(ThreadedProducer):
    """Reads one stream for one group; the arguments are those of `RedisStreamTrigger`."""

    trouble = TROUBLE

    def __init__(
        self,
        connection: str,
        stream: str,
        group: str,
        *,
        consumer: str = CONSUMER,
        create: bool = False,
        body: str = "fields",
        lane: str = "stream",
        dead_letter: str | None = None,
        claim_idle_s: float | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        for what, text in (("stream", stream), ("group", group), ("consumer", consumer)):
            check_name(what, text)
        if dead_letter is not None:
            check_name("dead_letter", dead_letter)
            if dead_letter == stream:
                raise ValueError("dead_letter must be another stream than the one that is read")
        check_choice("body", body, ("fields",), ("json:",))
        check_choice("lane", lane, ("stream", "message"), ("field:",))
        if claim_idle_s is not None and not claim_idle_s > 0:
            raise ValueError(f"claim_idle_s must be more than 0, not {claim_idle_s!r}")
        self.keeps_rejected = dead_letter is not None
        self._stream = stream
        self._group = group
        self._consumer = consumer
        self._creates = create
        self._json_field = body[5:].encode() if body != "fields" else None
        self._lane = lane
        self._lane_field = lane[6:].encode() if lane.startswith("field:") else None
        self._dead_letter = dead_letter
        self._claim_idle_s = claim_idle_s
        self._client: RedisClient | None = None
        # Our pending entries are read from here on, before any new one; None: all of them are held.
        self._pending_from: bytes | None = None
        self._claim_from, self._claim_at = b"0-0", 0.0
        self._ping_at = 0.0
        self._lost = 0  # entries that the server had dropped before the group got them, as far as reported

    @property
    def name(self) -> str:
        """The stream and the group."""
        return f"redis stream {self._stream} of group {self._group}"

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, check server, stream and group, and begin with the entries that are pending."""
        assert self.connection is not None
        self._client = client = open_client(self.connection)
        with translated(self.name):
            self._check_server(client)
            self._check_stream(client)
            # These change nothing: whether the permissions are there is better known now.
            run(client, "XACK", self._stream, self._group, "0-0")
            self._read("0", 1, None)
            if self._dead_letter is not None:
                with client.pipeline() as pipeline:
                    self._watch_place(pipeline)
                client.xpending_range(self._stream, self._group, "-", "+", 1)
                run(client, "XRANGE", self._stream, "0-0", "0-0")
            self._begin(*self._look_for_losses())
        self._pending_from = b"0"
        self._claim_from, self._claim_at = b"0-0", 0.0

    def positions(self) -> list[LanePosition]:
        """Ask for the ids of the stream and the group, and change nothing."""
        assert self.connection is not None
        self._client = client = open_client(self.connection)
        with translated(self.name):
            stream, group = client.xinfo_stream(self._stream), self._find_group()
        if group is None:
            raise BrokerSourceMissing(f"{self.name}: there is no such group")
        first = stream["first-entry"]
        return [
            LanePosition(
                end=_numbers(stream["last-generated-id"]),
                first=None if first is None else _numbers(first[0]),
                committed=_numbers(group["last-delivered-id"]),
                missing=_missing(stream, group),
                lag=_lag(stream, group),
                is_shared=int(group["consumers"]) > 1,
            )
        ]

    def _begin(self, stream: Mapping[str, Any], group: Mapping[str, Any] | None) -> None:
        """Note up to where the group has been given entries, and whether somebody has set that.

        ``XGROUP SETID`` and ``CREATE`` leave a group that does not know how many entries it has read. It may not know
        that after deletions either; then it cannot be told. An id begins with the time at which the entry was added,
        unless its publisher has given it another one; it was given out after that.
        """
        if group is not None:
            is_ours: bool | None = None
            if group.get("entries-read") is not None:
                is_ours = True
            elif stream.get("max-deleted-entry-id") == b"0-0":
                is_ours = False
            last = _numbers(group["last-delivered-id"])
            added_at = last[0] / 1000
            given_at = added_at if added_at <= time.time() else None
            self.lane_progress.begin("", last, is_ours=is_ours, committed_at=given_at)

    def disconnect(self) -> None:
        """Close the client."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _check_server(self, client: RedisClient) -> None:
        info: dict[str, Any] = {}
        for section in ("server", "memory", "persistence"):
            info |= ask(client, "INFO", section) or {}
        version = str(info.get("redis_version", "99"))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < VERSION_MIN:
            raise BrokerMisconfigured(f"{self.name}: the server is Redis {version}, and must be 6.2 or newer")
        policy = str(info.get("maxmemory_policy", ""))
        if info.get("maxmemory") and policy.startswith("allkeys"):
            raise BrokerMisconfigured(
                f"{self.name}: with maxmemory-policy {policy} the server drops whole streams when its memory is full; "
                f"set it to noeviction, or to one of volatile-*"
            )
        if info.get("aof_enabled") == 0:
            self.warn("the server has no append-only file: a crash of it loses entries")

    def _check_stream(self, client: RedisClient) -> None:
        kind = run(client, "TYPE", self._stream)
        if kind == b"none" and not self._creates:
            raise BrokerMisconfigured(f"{self.name}: there is no such stream, and create=True is not given")
        if kind not in (b"none", b"stream"):
            raise BrokerMisconfigured(f"{self.name}: there is a {kind.decode()} under that name, not a stream")
        if kind == b"stream" and run(client, "TTL", self._stream) != -1:
            raise BrokerMisconfigured(
                f"{self.name}: the stream expires, and its entries with it: PERSIST {self._stream} keeps it"
            )
        if kind == b"none" or self._find_group() is None:
            if not self._creates:
                raise BrokerMisconfigured(f"{self.name}: there is no such group, and create=True is not given")
            # From the beginning: of what the group may have had before, nothing is stored twice, and nothing skipped.
            run(client, "XGROUP", "CREATE", self._stream, self._group, "0", "MKSTREAM")
            _log.warning("the group is created, from the beginning of the stream", stream=self.name)

    def _find_group(self) -> Mapping[str, Any] | None:
        return self._ours(self._redis.xinfo_groups(self._stream))

    def _ours(self, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        return next((group for group in groups if group["name"] == self._group.encode()), None)

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return entries that are pending for our consumer, then those of others that have left, then new ones."""
        with translated(self.name):
            if self._pending_from is not None:
                entries = self._read(self._pending_from, count_max, None)
                self._pending_from = entries[-1][0] if entries else None
                if entries:
                    return [self._message(*entry) for entry in entries]
            if self._claim_idle_s is not None and time.monotonic() >= self._claim_at:
                if entries := self._claim(count_max):
                    return [self._message(*entry) for entry in entries]
            entries = self._read(">", count_max, wait_s)
            if entries:
                self.lane_progress.note("", _numbers(entries[-1][0]))
            return [self._message(*entry) for entry in entries]

    def idle(self) -> None:
        """Notice a link that is gone also while no entry is read."""
        if time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + PING_INTERVAL_S
            with translated(self.name):
                self._redis.ping()

    def _read(self, after: str | bytes, count_max: int, wait_s: float | None) -> list[tuple[bytes, Fields]]:
        """Return entries, those that are gone without fields. A wait of less than a millisecond is none."""
        block_ms = 0 if wait_s is None else int(wait_s * 1000)
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        answer = run(
            self._redis,
            "XREADGROUP",
            "GROUP",
            self._group,
            self._consumer,
            "COUNT",
            count_max,
            *block,
            "STREAMS",
            self._stream,
            after,
        )
        return [(entry_id, pairs_of(parts)) for _, entries in answer or () for entry_id, parts in entries]

    def _claim(self, count_max: int) -> list[tuple[bytes, Fields]]:
        """Take over entries that were handed out to another consumer, which is gone."""
        assert self._claim_idle_s is not None
        answer = run(
            self._redis,
            *("XAUTOCLAIM", self._stream, self._group, self._consumer, int(self._claim_idle_s * 1000)),
            *(self._claim_from, "COUNT", count_max),
        )
        self._claim_from = answer[0]
        if self._claim_from == b"0-0":
            self._claim_at = time.monotonic() + max(CLAIM_INTERVAL_S_MIN, self._claim_idle_s / 2)
        gone = answer[2] if len(answer) > 2 else ()
        # Before Redis 7 an entry that is gone has no id here. It is pending for us then, and read as that.
        claimed = [(each[0], pairs_of(each[1])) for each in answer[1] if each is not None]
        return [*claimed, *((each, ()) for each in gone)]

    def _message(self, entry_id: bytes, fields: Fields) -> Received:
        size = sum(len(name) + len(value) for name, value in fields)
        digest = hashlib.blake2b(digest_size=8)
        for part in (part for field in fields for part in field):
            digest.update(len(part).to_bytes(8, "big") + part)
        # A stream that was deleted and made anew may have the same ids, but hardly with the same content.
        content = digest.hexdigest() if fields else "gone"
        lane = entry_id if self._lane == "message" else self._lane_field and dict(fields).get(self._lane_field)
        key = f"redis:{self._stream}:{entry_id.decode()}:{content}"
        return Received(entry_id, self._raw_event(entry_id, fields, size), key, lane, size)

    def _raw_event(self, entry_id: bytes, fields: Fields, size: int) -> Any:
        """Return what filters get; an `Undecodable` for an entry that is not what ``body`` says."""
        if not fields:
            return Undecodable("the server has dropped the entry before it was handled (a trim?)", entry_id)
        head = b"\n".join(b"%b: %b" % field for field in fields)[:HEAD_BYTES_MAX]
        if (too_long := oversized(size, head, self.limits.message_bytes_max)) is not None:
            return too_long
        if self._json_field is None:
            try:
                named = named_fields((name.decode(), value.decode()) for name, value in fields)
            except UnicodeDecodeError as error:
                return Undecodable(f"a field is not UTF-8: {error.reason}", fields_as_they_are(fields))
            return {"id": entry_id.decode(), "stream": self._stream, "fields": named}
        name = self._json_field.decode()
        values = [value for each, value in fields if each == self._json_field]
        if len(values) != 1:
            what = f"is no field {name!r}" if not values else f"are {len(values)} fields {name!r}"
            return Undecodable(f"there {what}", fields_as_they_are(fields))
        try:
            return parsed_json(values[0])
        except (ValueError, RecursionError) as error:
            return Undecodable(f"the field {name!r} is not JSON: {error}", fields_as_they_are(fields))

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge entries, all in one command."""
        with translated(self.name):
            run(self._redis, "XACK", self._stream, self._group, *(message.ref for message in messages))

    def reject(self, messages: Sequence[Received]) -> None:
        """Copy entries to the stream of rejected ones and acknowledge them, each in one transaction of the server.

        An entry that we do not have any more has been copied: the answer to that was lost with an earlier connection.
        """
        for number, message in enumerate(messages):
            try:
                with translated(self.name):
                    self._move(message.ref)
            except RedisFull as error:
                reason = f"the stream {self._dead_letter} of dead_letter takes no entry: {error}"
                raise PlaceRefuses(reason, messages[number:]) from None

    def _move(self, entry_id: bytes) -> None:
        assert self._dead_letter is not None
        if not self._redis.xpending_range(self._stream, self._group, entry_id, entry_id, 1, self._consumer):
            return
        found = run(self._redis, "XRANGE", self._stream, entry_id, entry_id)
        fields = [part for _, parts in found for part in parts]
        origin = ("headgate-stream", self._stream, "headgate-group", self._group, "headgate-id", entry_id)
        with self._redis.pipeline(transaction=True) as pipeline:
            for _ in range(MOVE_ATTEMPTS_MAX):
                self._watch_place(pipeline)
                pipeline.multi()
                run(pipeline, "XADD", self._dead_letter, "*", *fields, *origin)
                run(pipeline, "XACK", self._stream, self._group, entry_id)
                try:
                    pipeline.execute()
                except WatchError:
                    continue  # another reader has put an entry there meanwhile
                return
        raise RedisFull("others write to it all the time")

    def _watch_place(self, pipeline: RedisPipeline) -> None:
        """Refuse a place that is no stream: in a transaction ``XADD`` would fail, and ``XACK`` behind it would not."""
        assert self._dead_letter is not None
        run(pipeline, "WATCH", self._dead_letter)
        kind = run(pipeline, "TYPE", self._dead_letter)
        if kind not in (b"none", b"stream"):
            raise BrokerMisconfigured(
                f"{self.name}: dead_letter {self._dead_letter} is a {kind.decode()}, not a stream"
            )

    def lag(self) -> int | None:
        """Return the entries that the group has not got, and those that it has not acknowledged."""
        with translated(self.name):
            stream, group = self._look_for_losses()
            self._look_for_strays()
        return None if group is None else _lag(stream, group)

    def _look_for_losses(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Report entries that were dropped from the stream before the group got them, as far as it can be known.

        Return what the server says of both, at one moment.
        """
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xinfo_stream(self._stream)
        pipeline.xinfo_groups(self._stream)
        stream, groups = pipeline.execute()
        group = self._ours(groups)
        lost = 0 if group is None else _missing(stream, group)
        if lost > self._lost:
            entries = lost - self._lost
            _log.error("entries were trimmed or deleted before they were read", stream=self.name, entries=entries)
            self.lane_progress.note_dropped("", (lost,), entries)
            self._lost = lost  # it may not be known for a while, and then it is 0
        return stream, group

    def _look_for_strays(self) -> None:
        """Read our pending entries again if there are more than we know of.

        Another process may have read under our name since we have connected: a runner that had lost its right to read,
        and did not know yet. What it got is nobody's.
        """
        known = self.known
        if self._pending_from is not None or known is None:
            return
        consumers = self._redis.xinfo_consumers(self._stream, self._group)
        pending = sum(int(each["pending"]) for each in consumers if each["name"] == self._consumer.encode())
        if pending > known:
            _log.warning("another reader has had entries under our name", stream=self.name, entries=pending - known)
            self._pending_from = b"0"

    @property
    def _redis(self) -> RedisClient:
        assert self._client is not None
        return self._client


class RedisStreamTrigger(BrokerTrigger):
    """Fires an event for every entry of a Redis stream; triggers of one stream, group and consumer share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.redis_client`); ``stream`` and ``group``
    must exist, unless ``create`` is true: then they are made, and the stream is read from its beginning. ``consumer``:
    the name under which the group remembers what this reader has. The raw event is ``{"id": str, "stream": str,
    "fields": {str: str}}``, with a list of values for a field that the entry has more than once; with
    ``body="json:FIELD"`` the value of that field, parsed.
    ``lane``: ``"stream"`` keeps the order of all entries, ``"field:FIELD"`` that of entries with the same value of the
    field, ``"message"`` none. ``dead_letter``: a stream that gets the entries that subscribers reject; without it they
    become dead letters of headgate. ``claim_idle_s``: take over entries that other consumers of the group have got and
    not acknowledged for so long. The limits are those of `headgate.brokers.threaded.ThreadedProducer`; values given by
    the first trigger of a stream apply to all of them. Raises ValueError for arguments that cannot be used.

    To select or transform entries, subclass it and override ``filter_shared_stream``.
    """

    producer = RedisStreamProducer
    scheme = "redis"
    place = ("connection", "stream", "group", "consumer")

    def __init__(
        self,
        connection: str,
        stream: str,
        group: str,
        *,
        consumer: str = CONSUMER,
        create: bool = False,
        body: str = "fields",
        lane: str = "stream",
        dead_letter: str | None = None,
        claim_idle_s: float | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))


def _missing(stream: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """Return how many entries were dropped from a stream before the group got them, as far as it can be known."""
    if group.get("entries-read") is None or "entries-added" not in stream:
        return 0  # of an older server, or after XGROUP SETID
    last = _numbers(group["last-delivered-id"])
    first = stream["first-entry"]
    if last >= _numbers(stream["last-generated-id"]):
        ahead = 0
    elif first is None or _numbers(first[0]) > last:
        ahead = int(stream["length"])
    else:
        return 0  # some are there that it has got, some that it has not: what is between cannot be counted
    return max(0, int(stream["entries-added"]) - int(group["entries-read"]) - ahead)


def _lag(stream: Mapping[str, Any], group: Mapping[str, Any]) -> int | None:
    """Return how many entries a group has not got, and those that it has not acknowledged; None if nobody knows.

    The server counts those that were dropped unread as well, for ever.
    """
    if group.get("lag") is None:
        return None
    return max(0, int(group["lag"]) - _missing(stream, group)) + int(group["pending"])


def _numbers(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
