"""SQS: what messages become, what is lent and given back, what is deleted item by item, and what is warned of."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from botocore.exceptions import ClientError
from tests.brokers.servers.certificates import Certify

from headgate.brokers import sqs as module
from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients import sqs_client
from headgate.brokers.clients.sqs_client import SqsClient, SqsPasses
from headgate.brokers.sqs import HELD_S_MAX, SENT_BYTES_MAX, SqsProducer, SqsTrigger, _Loan
from headgate.brokers.threaded import PlaceRefuses, Received
from headgate.protocol.values import decode_value
from headgate.testing.brokers.reading import Reading, names, subscribers
from headgate.testing.brokers.sqs_station import GROUPS, REGION, SqsAckParser, SqsStation
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until
from headgate.triggers.named_values import Connection

LONG_S = 3_600


def read_one(station: SqsStation, **kwargs: Any) -> Any:
    """Return the payload of the one event that a queue gives."""
    with Reading(station.trigger(**kwargs), uri=station.uri, has_restarts=False) as read:
        wait_until(read.payloads, "it is stored")
        (payload,) = [decode_value(each) for each in read.payloads()]
        (event,) = list(read._hosted.fired[0])
    assert event.key == f"arn:aws:sqs:{REGION}:123456789012:{station.queue}:{payload['message_id']}"
    return payload


def test_the_raw_event_has_body_attributes_and_time(station: SqsStation) -> None:
    attributes = {
        "tenant": {"DataType": "String", "StringValue": "eu"},
        "count": {"DataType": "Number", "StringValue": "7"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\xff"},
    }
    station.publish_bodies([("message-000001", '{"name": "Åsa"}')], MessageAttributes=attributes)
    payload = read_one(station, body="json")
    assert payload.pop("sent_at") == pytest.approx(time.time(), abs=3_600)
    assert payload.pop("message_id")
    assert payload == {
        "body": {"name": "Åsa"},
        "queue": station.queue,
        "attributes": {"tenant": "eu", "count": "7", "bytes": b"\xff"},
    }


def test_a_message_of_a_fifo_queue_has_its_group_and_its_place(fifo: SqsStation) -> None:
    fifo.publish_bodies([("message-000007", "AP8=")])
    payload = read_one(fifo, body="base64")
    assert (payload["body"], payload["group"]) == (b"\x00\xff", "group-7")
    assert int(payload["sequence"]) > 0


def test_messages_of_a_group_are_stored_in_order_also_after_a_failure(fifo: SqsStation) -> None:
    groups = 3
    messages = [f"message-{GROUPS * place + group:06d}" for place in range(8) for group in range(groups)]
    fifo.publish(messages)
    fails = messages[groups : 2 * groups]
    with Reading(*subscribers(fifo.trigger, 2, fails=fails), uri=fifo.uri) as read:
        for subscriber in range(2):
            read.wait_stored(messages, subscriber)
            order = read.order(subscriber)
            for group in range(groups):
                assert [name for name in order if int(name[-6:]) % GROUPS == group] == messages[group::groups]
        wait_until(lambda: not fifo.pending(), "everything is deleted")
    assert sorted(fifo.tap.acknowledged) == sorted(messages)


@pytest.mark.parametrize(("body", "says"), [("json", "not JSON"), ("base64", "not base64")])
def test_what_is_no_json_and_no_base64_is_a_whole_letter(station: SqsStation, body: str, says: str) -> None:
    station.publish_bodies([("message-000001", "{not")])
    with Reading(station.trigger(body=body), uri=station.uri) as read:
        wait_until(lambda: read.letters, "it is a letter")
        (letter,) = read.letters
        assert letter.is_whole
        assert says in letter.reason
        wait_until(lambda: station.count() == 0, "it is deleted")


def test_what_is_held_for_longer_than_the_queue_lends_is_not_received_again(station: SqsStation) -> None:
    station.publish(names(12))
    with Reading(station.trigger(), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(12))
        # Of another queue a message is lent for longer, and not extended: when it comes again the time is over.
        url = station.make_queue("clock")
        station.sqs.send_message(QueueUrl=url, MessageBody="tick")
        for seconds in (5, 0):
            lent = {"WaitTimeSeconds": 20, "VisibilityTimeout": seconds}
            assert station.sqs.receive_message(QueueUrl=url, **lent)["Messages"]
        assert station.count("ApproximateNumberOfMessagesNotVisible") == 12
        read.confirm()
        wait_until(lambda: not station.pending(), "everything is deleted")
    assert len(station.tap.acknowledged) == 12


def test_a_reader_that_ends_in_order_gives_back_what_it_has(station: SqsStation) -> None:
    station.publish(names(12))
    with Reading(station.trigger(visibility_s=LONG_S), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(12))
        assert station.count("ApproximateNumberOfMessages") == 0
    assert station.count("ApproximateNumberOfMessages") == 12


def test_what_is_given_back_costs_one_receipt_more_of_one_message(
    station: SqsStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_RECEIVES_S", WITHIN_S)  # moto looks for messages once a second
    station.publish(names(3))
    with Reading(station.trigger(visibility_s=LONG_S), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(3))
    wait_until(lambda: station.count("ApproximateNumberOfMessages") == 3, "all are given back")
    url = station.sqs.get_queue_url(QueueName=station.queue)["QueueUrl"]
    asked: dict[str, Any] = {"MaxNumberOfMessages": 10, "MessageSystemAttributeNames": ["ApproximateReceiveCount"]}
    received = station.sqs.receive_message(QueueUrl=url, **asked)["Messages"]
    receipts = [int(message["Attributes"]["ApproximateReceiveCount"]) for message in received]
    assert sorted(receipts) in ([2, 2, 2], [2, 2, 3])


def test_a_message_that_the_queue_moves_away_next_is_warned_of(station: SqsStation) -> None:
    station.create()  # the warning does not depend on how many there are
    url = station.make_queue("few", receipts=1)
    station.sqs.send_message(QueueUrl=url, MessageBody="message-000001")
    trigger = station.trigger(queue=station.name_of("few"), accept_drop=True)
    with structlog.testing.capture_logs() as records, Reading(trigger, uri=station.uri) as read:
        read.wait_stored(names(1, 1))
    assert [record["log_level"] for record in records if "for the last time" in record["event"]] == ["warning"]


def test_a_queue_that_may_lose_messages_is_warned_of(station: SqsStation) -> None:
    station.make_queue("plain", MessageRetentionPeriod="3600")
    checked = station.trigger(queue=station.name_of("plain"), visibility_s=30).check(station.uri)
    assert (checked.problem, checked.lag) == ("", 0)
    assert checked.warnings == (
        "the queue drops messages after 3,600 s, also those that are not read",
        "the queue has no dead-letter queue: what cannot be stored is dropped after 3,600 s",
    )
    station.make_queue("hasty", receipts=3)
    hasty = station.trigger(queue=station.name_of("hasty"), accept_drop=True).check(station.uri)
    assert hasty.problem == ""
    assert hasty.warnings == (
        f"the queue moves a message to {station.name_of('dropped')} after 3 receipts, and each runner that dies spends "
        f"one (maxReceiveCount)",
        "a runner that stands still for 3 s has its messages delivered again",
    )


def test_without_a_key_in_the_connection_that_of_the_environment_is_used(
    station: SqsStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.publish(names(3))
    uri = f"sqs+http://127.0.0.1:{station.tap.port}"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    assert "Unable to locate credentials; the runner sees AWS_*" in station.trigger().check(uri).problem
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", station.moto.me.name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", station.moto.me.secret)
    assert station.trigger().check(uri).lag == 3


# --- item by item ------------------------------------------------------------------------------------


class FailingSqs:
    """Answers batches: an item whose receipt is in ``fails`` so many times fails, one of ``refuses`` for good."""

    def __init__(self, fails: dict[str, int], refuses: Sequence[str] = ()) -> None:
        self.fails = fails
        self.refuses = refuses
        self.asked: list[list[str]] = []
        self.seconds: dict[str, int] = {}

    def call_all(self, operation: str, calls: Sequence[Any], *, in_order: bool) -> list[dict[str, Any]]:
        assert not in_order
        return [self.answer(call["Entries"]) for call in calls]

    def close(self) -> None:
        """As of a client."""

    def answer(self, entries: Sequence[Any]) -> dict[str, Any]:
        self.asked.append([entry["ReceiptHandle"] for entry in entries])
        self.seconds |= {entry["ReceiptHandle"]: entry.get("VisibilityTimeout", -1) for entry in entries}
        failed = []
        for entry in entries:
            receipt = entry["ReceiptHandle"]
            if receipt in self.refuses:
                failed.append({"Id": entry["Id"], "SenderFault": True, "Code": "ReceiptHandleIsInvalid"})
            elif self.fails.get(receipt, 0):
                self.fails[receipt] -= 1
                failed.append({"Id": entry["Id"], "SenderFault": False, "Code": "InternalError", "Message": "again"})
        return {"Failed": failed}


def producer_of(sqs: FailingSqs, count: int, *, begun: float | None = None) -> tuple[SqsProducer, list[Received]]:
    producer = SqsProducer(CONNECTION, "orders")
    until = (time.monotonic() if begun is None else begun) + HELD_S_MAX
    producer._loans = {f"id-{number}": _Loan(f"receipt-{number}", until, None) for number in range(count)}
    producer._sqs = sqs  # type: ignore[assignment]
    return producer, [Received(ref, {}, ref) for ref in producer._loans]


def test_what_was_put_aside_before_a_failure_is_not_put_aside_again(
    station: SqsStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.publish(names(3))
    producer = SqsProducer(CONNECTION, station.queue, **station.with_place())
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    try:
        producer.connect()
        messages: list[Received] = []

        def are_received() -> bool:
            messages.extend(producer.receive(3, 0.1))
            return len(messages) == 3

        wait_until(are_received, "all are received")
        call, calls = producer._client.call, []

        def failing_call(operation: str, **arguments: Any) -> Any:
            calls.append(operation)
            if calls.count("send_message") == 3:
                raise ConnectionError("gone")
            return call(operation, **arguments)

        with monkeypatch.context() as failing:
            failing.setattr(producer._client, "call", failing_call)
            with pytest.raises(ConnectionError):
                producer.reject(messages)
        assert "delete_message_batch" not in calls
        producer.reject(messages)
    finally:
        producer.disconnect()
    assert sorted(name for body in station.in_place() for name in names(3) if name in body) == names(3)
    assert not station.pending()


@pytest.mark.parametrize(("body", "own"), [(SENT_BYTES_MAX - 400, 2), (SENT_BYTES_MAX - 60, 1), (SENT_BYTES_MAX, 0)])
def test_attributes_of_ours_make_no_message_too_long_for_its_place(body: int, own: int) -> None:
    sent: list[Any] = []
    producer = SqsProducer(CONNECTION, "orders", dead_letter="rejected")
    producer._sqs = SimpleNamespace(call=lambda _, **given: sent.append(given))  # type: ignore[assignment]
    given = {"a": {"DataType": "Binary", "BinaryValue": b"\xff"}}
    producer._loans = {"id-1": _Loan("receipt", time.monotonic(), {"Body": "x" * body, "MessageAttributes": given})}
    producer._send(Received("id-1", {}, "id-1"))
    (call,) = sent
    assert len(call["MessageAttributes"]) == 1 + own
    assert call["MessageAttributes"]["a"] == given["a"]


def test_what_a_place_refuses_for_now_keeps_nothing_else_from_being_deleted() -> None:
    class Throttling(FailingSqs):
        def call(self, operation: str, **arguments: Any) -> None:
            if arguments["MessageBody"] in self.refuses:
                raise SqsPasses("ThrottlingException: later")

    sqs = Throttling({}, refuses=["body 1"])
    producer, messages = producer_of(sqs, 3)
    producer._dead_letter = "rejected"
    producer._loans = {ref: loan._replace(message={"Body": f"body {ref[3:]}"}) for ref, loan in producer._loans.items()}
    messages = [message._replace(lane=message.ref) for message in messages]
    with pytest.raises(PlaceRefuses, match="the queue rejected of dead_letter takes no message: Throttl") as refused:
        producer.reject(messages)
    assert [message.ref for message in refused.value.messages] == list(producer._loans) == ["id-1"]
    assert sqs.asked == [["receipt-0", "receipt-2"]]


def test_what_a_batch_has_failed_on_is_repeated_and_nothing_else() -> None:
    sqs = FailingSqs({"receipt-3": 2, "receipt-11": 1}, refuses=["receipt-5"])
    producer, messages = producer_of(sqs, 12)
    with structlog.testing.capture_logs() as records:
        producer.acknowledge(messages)
    assert [len(receipts) for receipts in sqs.asked] == [10, 2, 2, 1]
    assert sqs.asked[2:] == [["receipt-3", "receipt-11"], ["receipt-3"]]
    assert producer._loans == {}
    assert [record["messages"] for record in records] == [1], "one is refused, and comes again"


def test_a_batch_that_fails_again_and_again_is_trouble_and_its_messages_are_kept() -> None:
    sqs = FailingSqs({"receipt-1": 100})
    producer, messages = producer_of(sqs, 2)
    with pytest.raises(SqsPasses, match="delete_message_batch fails for 1 messages: InternalError: again"):
        producer.acknowledge(messages)
    assert list(producer._loans) == ["id-0", "id-1"]
    assert issubclass(SqsPasses, sqs_client.TROUBLE)


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_receive_has_brought_is_kept_if_another_fails_and_given_back_at_the_end(ends: bool) -> None:
    sqs = FailingSqs({})
    producer, _ = producer_of(sqs, 0)
    failed, done = Future[Any](), Future[Any]()
    failed.set_exception(SqsPasses("later"))
    message = {"MessageId": "id-1", "ReceiptHandle": "receipt-1", "Body": "", "Attributes": {"SentTimestamp": "0"}}
    done.set_result(([message], time.monotonic()))
    producer._receives, producer._receivers = {failed: 10, done: 10}, sqs_client.Workers(1)
    if ends:
        producer.give_back([])
        assert sqs.seconds == {"receipt-1": 0}
    producer.disconnect()
    assert [message.ref for message in producer._waiting] == list(producer._loans) == ["id-1"]
    assert producer._receives == {}


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_receive_gets_of_what_is_given_back_is_given_back_too(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = Future[Any]()

    class Waking(FailingSqs):
        def answer(self, entries: Sequence[Any]) -> dict[str, Any]:
            answer = super().answer(entries)
            if len(self.asked) == (1 if is_first else 2):  # before that another reader is faster
                own = {"MessageId": "id-0", "ReceiptHandle": "newer", "Body": "", "Attributes": {"SentTimestamp": "0"}}
                under_way.set_result(([own], time.monotonic()))
            return answer

    if not is_first:
        monkeypatch.setattr(module, "END_RECEIVES_S", 0.01)
    queue = Waking({})
    producer, _ = producer_of(queue, 3)
    producer._receives = {under_way: 10}
    producer.give_back(list(producer._loans))
    all_of_them = ["newer" if is_first else "receipt-0", "receipt-1", "receipt-2"]
    assert queue.asked == [["receipt-0"], all_of_them, *([] if is_first else [["newer"]])]
    assert set(queue.seconds.values()) == {0}
    assert producer._receives == {}


def test_no_message_is_extended_beyond_the_time_for_which_sqs_lends_at_most() -> None:
    sqs = FailingSqs({})
    producer, _ = producer_of(sqs, 1, begun=time.monotonic() - HELD_S_MAX + 30)
    producer._loans |= {"over": _Loan("over", time.monotonic() - 1, None)}
    producer._loans |= {"young": _Loan("young", time.monotonic() + HELD_S_MAX, None)}
    producer._loans |= {"passed over": _Loan("passed over", time.monotonic() + HELD_S_MAX, None)}
    producer.extend(["id-0", "over", "young", "unknown"])
    assert producer._loans.keys() == {"id-0", "over", "young"}, "one that nobody holds is not remembered"
    assert sqs.seconds.keys() == {"receipt-0", "young"}
    assert 0 < sqs.seconds["receipt-0"] <= 30
    assert sqs.seconds["young"] == 60


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("ThrottlingException", 400, None),
        ("OverLimit", 403, None),
        ("ExpiredToken", 403, None),
        ("Strange", 503, None),
        ("AccessDeniedException", 400, "AWS refuses access"),
        ("SignatureDoesNotMatch", 403, "AWS refuses access"),
        ("AWS.SimpleQueueService.NonExistentQueue", 400, "does not exist"),
        ("InvalidParameterValue", 400, "BrokerError: orders: InvalidParameterValue: a message"),
    ],
)
def test_errors_of_aws_end_the_stream_unless_they_pass(code: str, status: int, says: str | None) -> None:
    message = (
        "a message\n\nThe Canonical String for this request should have been\n'POST\nx-amz-security-token:hunter22'"
    )
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(Exception, match="a message") as raised, sqs_client.translated("orders"):
        raise ClientError(response, "ReceiveMessage")
    assert "hunter22" not in str(raised.value)
    assert isinstance(raised.value, sqs_client.TROUBLE) == (says is None)
    assert says is None or says in f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"queue": ""}, r"queue must have 1\.\.256 printable characters"),
        ({"visibility_s": 1}, r"visibility_s must be 2\.\.3,600 whole seconds, not 1"),
        ({"visibility_s": 2.5}, "visibility_s must be an int, not float"),
        ({"body": "bytes"}, 'body must be "text", "json" or "base64"'),
        ({"dead_letter": "orders"}, "dead_letter must be another queue"),
        ({"dead_letter": "rejected.fifo"}, "dead_letter must be a FIFO queue if the one that is read is"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        SqsTrigger(**{"connection": "shop", "queue": "orders", **kwargs})


def test_no_secret_is_in_what_is_shown_of_a_client(station: SqsStation) -> None:
    producer = SqsProducer(CONNECTION, station.queue)
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    producer.connect()
    shown = [repr(producer.connection), repr(producer._sqs), repr(producer._client._client), repr(vars(producer))]
    producer.disconnect()
    assert station.moto.me.secret not in "".join(shown)


def read_request(link: socket.socket) -> None:
    """Read to its end: closing a link with bytes that were not read resets it, and loses the answer."""
    request = link.makefile("rb")
    heads = iter(lambda: request.readline().strip().lower(), b"")
    lengths = [int(head.partition(b":")[2]) for head in heads if head.startswith(b"content-length:")]
    request.read(sum(lengths))


def test_certificates_of_both_sides_are_checked(certify: Certify) -> None:
    server, client, other = certify("server"), certify("client"), certify("other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*server)
    context.load_verify_locations(client[0])
    context.verify_mode = ssl.CERT_REQUIRED
    body = b'{"QueueUrl": "https://sqs/orders"}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)

    def serve() -> None:
        with contextlib.suppress(OSError):  # of the listener, when it is closed
            while True:
                link, _ = listener.accept()
                with contextlib.suppress(OSError), context.wrap_socket(link, server_side=True) as secured:
                    read_request(secured)
                    secured.sendall(answer)

    def url_of(ca: tuple[Path, Path], own: tuple[Path, Path]) -> Any:
        query = f"region={REGION}&ssl_ca_certs={ca[0]}&ssl_certfile={own[0]}&ssl_keyfile={own[1]}"
        uri = f"sqs://key:hunter22@127.0.0.1:{listener.getsockname()[1]}/?{query}"
        client = SqsClient(Connection.from_uri("shop", uri), "test")
        with contextlib.closing(client):
            return client.call("get_queue_url", QueueName="orders")["QueueUrl"]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert url_of(server, client) == "https://sqs/orders"
        with pytest.raises(BrokerMisconfigured, match="the certificate of the server is refused: self-signed"):
            url_of(other, client)
        with pytest.raises((BrokerMisconfigured, *sqs_client.TROUBLE)):  # the alert may be lost with the link
            url_of(server, other)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_tap_finds_deletions_wherever_the_bytes_are_cut() -> None:
    receipts = {"r-1": "message-000001", "r-2": "message-000002"}
    body = json.dumps({"Entries": [{"Id": str(n), "ReceiptHandle": f"r-{n}"} for n in (1, 2, 3)]}).encode()
    other = b"POST / HTTP/1.1\r\nX-Amz-Target: AmazonSQS.GetQueueUrl\r\nContent-Length: 2\r\n\r\n{}"
    head = b"POST / HTTP/1.1\r\nX-Amz-Target: AmazonSQS.DeleteMessageBatch\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent = other + head + body + other
    for size in range(1, len(sent)):
        parser = SqsAckParser(receipts, threading.Lock())
        found = [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])]
        assert found == ["message-000001", "message-000002"]
