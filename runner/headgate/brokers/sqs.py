"""Amazon SQS: a standard or FIFO queue, each message deleted once it is stored.

The promise, in the words of ``docs/brokers.md``: **every message that the queue hands out is stored once**, for each
watcher, whatever dies. A message is known by its queue and its ``MessageId``, which SQS never changes. It is deleted
after everything derived from it is stored, ten at a time, and what SQS says of each is heeded.

A queue lends a message for its *visibility*, which is extended for what is held, however slow the database is, for up
to twelve hours. What a runner had that died comes again when that time is over; one that ends in order gives it back.
Each receipt is counted by a queue with a redrive policy, which moves a message away after so many. So what failed is
handed out again from memory, and a policy that a few restarts would use up is refused.

A FIFO queue keeps the order of each group, which is a lane here: while one of its messages is held, no other runner
gets any of it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name, check_names
from headgate.brokers.clients.bodies import decoded_body, event_of
from headgate.brokers.clients.sqs_client import BATCH_MAX, RECEIVE_S_MAX, TROUBLE, SqsClient, SqsPasses, Workers
from headgate.brokers.threaded import (
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    BrokerError,
    BrokerMisconfigured,
    PlaceRefuses,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import Undecodable

__all__ = ["SqsProducer", "SqsTrigger"]

VISIBILITY_S: Final = 60
VISIBILITY_S_RANGE: Final = (2, 3_600)
VISIBILITY_S_WARNED: Final = 10  # a runner that stands still for longer has its messages delivered again
HELD_S_MAX: Final = 43_200  # from one receipt on: SQS lends for no longer
RECEIPTS_MIN: Final = 5  # that a redrive policy must allow, or it is refused
RECEIPTS_WARNED: Final = 10
RETENTION_S_WARNED: Final = 86_400  # a queue that drops its messages sooner is warned of
RECEIVES_MAX: Final = 3  # calls at the same moment while there is much to receive
END_RECEIVES_S: Final = 1.5  # for receives to end, twice at most: a stream has 4 s for all of its end
FIFO_RECEIVE_S: Final = 1  # while messages are held: that their group is free again may not end the wait of a call
TRIES_MAX: Final = 3  # of an item of a batch that SQS has failed to handle
ATTRIBUTES_MAX: Final = 10  # of one message
SENT_BYTES_MAX: Final = 256 * 1024  # of a message to which attributes of ours are added: every queue may take this
BODIES: Final = ("text", "json", "base64")
FIFO: Final = ".fifo"
ASKED: Final = ("ApproximateReceiveCount", "MessageGroupId", "SentTimestamp", "SequenceNumber")
_AT_ONCE: Final = {"VisibilityTimeout": 0}

_log = structlog.get_logger("headgate.brokers.sqs")

Item = TypeVar("Item")


class _Loan(NamedTuple):
    """A message that SQS has lent: the newest receipt of it, and until when it can be extended."""

    receipt: str
    until: float
    message: Mapping[str, Any] | None  # if it may go to the place of rejected ones, and is not there yet


class SqsProducer(ThreadedProducer):
    """Reads one queue; the arguments are those of `SqsTrigger`."""

    trouble = TROUBLE

    def __init__(
        self,
        connection: str,
        queue: str,
        *,
        account: str | None = None,
        body: str = "text",
        visibility_s: int = VISIBILITY_S,
        dead_letter: str | None = None,
        accept_drop: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        check_name("queue", queue)
        check_names(account=account, dead_letter=dead_letter)
        if dead_letter == queue:
            raise ValueError("dead_letter must be another queue than the one that is read")
        if dead_letter is not None and dead_letter.endswith(FIFO) != queue.endswith(FIFO):
            raise ValueError("dead_letter must be a FIFO queue if the one that is read is, and only then")
        check_choice("body", body, BODIES)
        least, most = VISIBILITY_S_RANGE
        if not isinstance(visibility_s, int) or not least <= visibility_s <= most:
            raise ValueError(f"visibility_s must be {least}..{most:,} whole seconds, not {visibility_s!r}")
        self.keeps_rejected = dead_letter is not None
        self._queue = queue
        self._account = account
        self._body = body
        self._visibility_s = visibility_s
        self._dead_letter = dead_letter
        self._accepts_drop = accept_drop
        self._is_fifo = queue.endswith(FIFO)
        self._sqs: SqsClient | None = None
        self._url = self._place_url = self._arn = ""
        self._receipts_max: int | None = None  # after so many the queue moves a message away
        self._receivers: Workers
        self._receives: dict[Future[Any], int] = {}  # under way, with how many messages each may bring
        self._is_full = False  # the last one has brought as many as it might
        self._waiting: deque[Received] = deque()
        self._loans: dict[str, _Loan] = {}  # by message id

    @property
    def name(self) -> str:
        """The queue."""
        return f"sqs queue {self._queue}"

    @property
    def extend_s(self) -> float | None:
        """A third of the visibility."""
        return self.limits.extend_s or self._visibility_s / 3

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Make a client, find the queue, and look whether it loses messages."""
        assert self.connection is not None
        self._sqs, self._receivers = SqsClient(self.connection, self.name), Workers(RECEIVES_MAX)
        self._url = self._url_of(self._queue)
        attributes = self._attributes("All")
        if self._arn not in ("", attributes["QueueArn"]):
            raise BrokerMisconfigured(f"{self.name}: the connection leads to another queue than before")
        self._arn = attributes["QueueArn"]
        self._check_redrive(attributes)
        # Both change nothing, as no message has such a receipt: whether the permissions are there is better known now.
        nothing = {"Id": "0", "ReceiptHandle": "headgate"}
        for operation, more in (("delete_message_batch", {}), ("change_message_visibility_batch", _AT_ONCE)):
            self._client.call(operation, QueueUrl=self._url, Entries=[{**nothing, **more}])
        if self._dead_letter is not None:
            self._place_url = self._url_of(self._dead_letter)
        if self._visibility_s < VISIBILITY_S_WARNED:
            self.warn(f"a runner that stands still for {self._visibility_s} s has its messages delivered again")

    def disconnect(self) -> None:
        """Close the client. What is lent stays lent, and can be deleted by the next one."""
        with contextlib.suppress(Exception):  # of a receive: the connection is given up anyway
            self._collect()
        client, self._sqs = self._sqs, None
        self._receives.clear()
        self._is_full = False
        if client is not None:
            client.close()
            self._receivers.close()

    def _url_of(self, queue: str) -> str:
        account = {} if self._account is None else {"QueueOwnerAWSAccountId": self._account}
        try:
            return str(self._client.call("get_queue_url", QueueName=queue, **account)["QueueUrl"])
        except BrokerMisconfigured as error:
            raise error if queue == self._queue else BrokerMisconfigured(f"dead_letter {queue}: {error}") from None

    def _attributes(self, *names: str) -> dict[str, str]:
        answer = self._client.call("get_queue_attributes", QueueUrl=self._url, AttributeNames=list(names))
        return dict(answer["Attributes"])

    def _check_redrive(self, attributes: Mapping[str, str]) -> None:
        """Look at what the queue does with messages that are received often, and with old ones."""
        kept_s = int(attributes["MessageRetentionPeriod"])
        if kept_s < RETENTION_S_WARNED:
            self.warn(f"the queue drops messages after {kept_s:,} s, also those that are not read")
        policy = msgspec.json.decode(attributes.get("RedrivePolicy") or "{}")
        if not policy:
            self._receipts_max = None
            self.warn(f"the queue has no dead-letter queue: what cannot be stored is dropped after {kept_s:,} s")
            return
        self._receipts_max = receipts = int(policy["maxReceiveCount"])
        place = str(policy.get("deadLetterTargetArn", "")).rpartition(":")[2]
        moved = f"the queue moves a message to {place} after {receipts:,} receipts"
        if receipts < RECEIPTS_MIN and not self._accepts_drop:
            raise BrokerMisconfigured(
                f"{self.name}: {moved}, and each runner that dies spends one (maxReceiveCount): set it to "
                f"{RECEIPTS_WARNED} or more; accept_drop=true reads it all the same"
            )
        if receipts < RECEIPTS_WARNED:
            self.warn(f"{moved}, and each runner that dies spends one (maxReceiveCount)")

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return messages that have come, and have other threads receive more: deletions do not wait for these."""
        room = count_max - len(self._waiting) - sum(self._receives.values())
        while room > 0 and len(self._receives) < (RECEIVES_MAX if self._is_full else 1):
            count = min(BATCH_MAX, room)
            self._receives[self._receivers.start(self._receive_call(count))] = count
            room -= count
        if not self._waiting:
            wait(self._receives, wait_s, FIRST_COMPLETED)
        self._collect()
        return [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]

    def idle(self) -> None:
        """Take what has come, so that it is extended, too."""
        self._collect()

    def _receive_call(self, count: int) -> Any:
        client = self._client
        arguments = {
            "QueueUrl": self._url,
            "MaxNumberOfMessages": count,
            "WaitTimeSeconds": FIFO_RECEIVE_S if self._is_fifo and self._loans else RECEIVE_S_MAX,
            "VisibilityTimeout": self._visibility_s,
            "MessageAttributeNames": ["All"],
            "MessageSystemAttributeNames": list(ASKED),
        }

        def receive() -> tuple[list[Any], float]:
            begun = time.monotonic()
            messages = client.call("receive_message", **arguments).get("Messages", [])
            if messages and client is not self._sqs:  # nobody takes them any more
                receipts = [message["ReceiptHandle"] for message in messages]
                entries = [{"Id": str(n), "ReceiptHandle": each, **_AT_ONCE} for n, each in enumerate(receipts)]
                client.call("change_message_visibility_batch", QueueUrl=arguments["QueueUrl"], Entries=entries)
            return messages, begun

        return receive

    def _collect(self) -> None:
        done = [each for each in self._receives if each.done()]  # in the order in which they were made
        # Those that have failed last: what the others have brought would be nobody's until its visibility is over.
        for future in sorted(done, key=lambda each: each.exception() is not None):
            count = self._receives.pop(future)
            messages, begun = future.result()
            self._is_full = len(messages) == count
            self._waiting += [self._received(message, begun) for message in messages]

    def _received(self, message: Mapping[str, Any], begun: float) -> Received:
        message_id, text = str(message["MessageId"]), str(message["Body"])
        own = message.get("Attributes", {})
        given = {name: _value(each) for name, each in message.get("MessageAttributes", {}).items()}
        known = self._loans.get(message_id)
        is_in_place = known is not None and known.message is None
        kept = message if self._dead_letter is not None and not is_in_place else None
        self._loans[message_id] = _Loan(message["ReceiptHandle"], begun + HELD_S_MAX, kept)
        if self._receipts_max is not None and int(own["ApproximateReceiveCount"]) >= self._receipts_max:
            _log.warning("a message is received for the last time", stream=self.name, message=message_id)
        body = text.encode()
        size = len(body) + sum(len(name) + len(value) for name, value in given.items())
        lane = own.get("MessageGroupId") if self._is_fifo else message_id
        rest = {
            "queue": self._queue,
            "message_id": message_id,
            "sent_at": int(own["SentTimestamp"]) / 1000,
            "attributes": given,
        }
        if self._is_fifo:
            rest |= {"group": own["MessageGroupId"], "sequence": own["SequenceNumber"]}
        too_long = oversized(size, body, self.limits.message_bytes_max)
        raw_event = event_of(self._decoded(body), rest) if too_long is None else too_long
        return Received(message_id, raw_event, f"{self._arn}:{message_id}", lane, size)

    def _decoded(self, body: bytes) -> Any:
        if self._body != "base64":
            return decoded_body(body, self._body)
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            return Undecodable(f"the body is not base64: {error}", body)

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Delete messages. One whose loan is over is not deleted: it comes again, and is recognised by its key."""
        refs = [message.ref for message in messages if message.ref in self._loans]
        refused = self._each("delete_message_batch", [(ref, {}) for ref in refs])
        if refused:
            _log.warning("messages could not be deleted, and come again", stream=self.name, messages=len(refused))
        for ref in refs:
            del self._loans[ref]

    def reject(self, messages: Sequence[Received]) -> None:
        """Send messages to the queue of rejected ones, each with its attributes, and then delete them.

        If it fails in between it is called again, and what was sent is not sent again.
        """
        self.put_aside(messages, self._send)

    def _send(self, message: Received) -> None:
        if (loan := self._loans.get(message.ref)) is None or loan.message is None:
            return
        attributes = dict(loan.message.get("MessageAttributes", {}))
        for name, text in (("headgate-queue", self._queue), ("headgate-message-id", message.ref)):
            more = {**attributes, name: {"DataType": "String", "StringValue": text}}
            if len(more) <= ATTRIBUTES_MAX and _sent_bytes(loan.message["Body"], more) <= SENT_BYTES_MAX:
                attributes = more
        of_fifo = {"MessageGroupId": message.lane, "MessageDeduplicationId": message.ref} if self._is_fifo else {}
        try:
            self._client.call(
                "send_message",
                QueueUrl=self._place_url,
                MessageBody=loan.message["Body"],
                MessageAttributes=attributes,
                **of_fifo,
            )
        except SqsPasses as error:
            raise PlaceRefuses(f"the queue {self._dead_letter} of dead_letter takes no message: {error}") from None
        except BrokerError as error:
            raise type(error)(f"dead_letter {self._dead_letter}: {error}") from None
        self._loans[message.ref] = loan._replace(message=None)

    def leave(self, messages: Sequence[Received]) -> None:
        """Have these come again when their visibility is over, until the queue moves them away."""
        for message in messages:
            self._loans.pop(message.ref, None)

    def extend(self, refs: Sequence[Any]) -> None:
        """Have SQS lend for longer what is held, and what waits to be handed out."""
        held = {*refs, *self._waiting_refs}
        # One that was left to the queue comes again and is passed over: its loan is nobody's.
        self._loans = {ref: loan for ref, loan in self._loans.items() if ref in held}
        self._lend(self._loans, self._visibility_s)

    def give_back(self, refs: Sequence[Any]) -> None:
        """Make messages visible at once, so that the next runner gets them without a wait.

        Our own receives would be the first to get them, as they wait for seconds. So one message for each ends these
        before all others follow, with what they have brought: each receipt more is counted by a redrive policy.
        """
        self._collect_at_end(0.0)
        deadline = time.monotonic() + END_RECEIVES_S
        for ref in [*refs, *self._waiting_refs][: len(self._receives)]:
            self._lend([ref], 0)
            self._collect_at_end(max(0.0, deadline - time.monotonic()))
        self._lend((*refs, *self._waiting_refs), 0)
        if self._receives and refs:
            # Another reader was faster with what was to end them.
            self._collect_at_end(END_RECEIVES_S)
            self._lend(self._waiting_refs, 0)

    @property
    def _waiting_refs(self) -> list[str]:
        return [message.ref for message in self._waiting]

    def _collect_at_end(self, wait_s: float) -> None:
        wait(self._receives, wait_s, FIRST_COMPLETED)
        with contextlib.suppress(*TROUBLE):  # of a receive, which may be over
            self._collect()

    def _lend(self, refs: Iterable[str], seconds: int) -> None:
        now = time.monotonic()
        items: list[tuple[str, dict[str, Any]]] = []
        for ref in dict.fromkeys(refs):
            loan = self._loans.get(ref)
            if loan is not None and (left_s := int(loan.until - now)) > 0:
                items.append((ref, {"VisibilityTimeout": min(seconds, left_s)}))
        refused = self._each("change_message_visibility_batch", items)
        if refused:
            _log.info("messages are not lent any more, and come again", stream=self.name, messages=len(refused))

    def _each(self, operation: str, items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Do something with messages, in batches; return those that SQS refuses. Those it fails on are tried again.

        Raises `SqsPasses` if it fails on them again and again.
        """
        left, refused, reason = list(items), list[str](), ""
        for _ in range(TRIES_MAX):
            batches = list(_batches(left))
            calls = [
                {
                    "QueueUrl": self._url,
                    "Entries": [
                        {"Id": str(number), "ReceiptHandle": self._loans[ref].receipt, **more}
                        for number, (ref, more) in enumerate(batch)
                    ],
                }
                for batch in batches
            ]
            left, answers = [], self._client.call_all(operation, calls, in_order=self._is_fifo)
            for batch, answer in zip(batches, answers, strict=True):
                for failure in answer.get("Failed", ()):
                    item = batch[int(failure["Id"])]
                    if failure["SenderFault"]:
                        refused.append(item[0])
                    else:
                        left.append(item)
                        reason = f"{failure['Code']}: {failure.get('Message', '')}"
            if not left:
                return refused
        raise SqsPasses(f"{operation} fails for {len(left)} messages: {reason}")

    def lag(self) -> int | None:
        """Return about how many messages the queue has: to be received, received, and delayed."""
        counts = self._attributes(
            "ApproximateNumberOfMessages",
            "ApproximateNumberOfMessagesNotVisible",
            "ApproximateNumberOfMessagesDelayed",
        )
        return sum(map(int, counts.values()))

    @property
    def _client(self) -> SqsClient:
        assert self._sqs is not None
        return self._sqs


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for begin in range(0, len(items), BATCH_MAX):
        yield items[begin : begin + BATCH_MAX]


def _sent_bytes(body: str, attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the bytes of a message as SQS counts them: its body, and names, types and values of its attributes."""
    of = [name + each["DataType"] for name, each in attributes.items()]
    values = [value if isinstance(value, bytes) else value.encode() for value in map(_value, attributes.values())]
    return len(body.encode()) + sum(len(text.encode()) for text in of) + sum(map(len, values))


def _value(attribute: Mapping[str, Any]) -> str | bytes:
    """Return the value of a message attribute: text, also of numbers, or bytes."""
    value = attribute.get("StringValue", attribute.get("BinaryValue", ""))
    return value if isinstance(value, bytes) else str(value)


class SqsTrigger(BrokerTrigger):
    """Fires an event for every message of an SQS queue; triggers of one queue share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.sqs_client`); ``queue`` is the name of the
    queue, which must exist, and one of ``account`` if that is given. The raw event is ``{"body": ..., "queue": str,
    "message_id": str, "sent_at": float, "attributes": {str: str | bytes}}``, with the time in seconds since 1970, and
    for a FIFO queue ``"group"`` and ``"sequence"``. ``body``: ``"text"``, ``"json"`` (parsed) or ``"base64"`` (bytes).
    ``visibility_s``: for how many seconds SQS lends a message, extended while it is held. ``dead_letter``: a queue that
    gets the messages that subscribers reject; without it they become dead letters of headgate. ``accept_drop``: read a
    queue that moves messages away after a few receipts. The limits are those of
    `headgate.brokers.threaded.ThreadedProducer`. Raises ValueError for arguments that cannot be used.

    To select or transform messages, subclass it and override ``filter_shared_stream``.
    """

    producer = SqsProducer
    scheme = "sqs"
    place = ("connection", "queue", "account")

    def __init__(
        self,
        connection: str,
        queue: str,
        *,
        account: str | None = None,
        body: str = "text",
        visibility_s: int = VISIBILITY_S,
        dead_letter: str | None = None,
        accept_drop: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))
