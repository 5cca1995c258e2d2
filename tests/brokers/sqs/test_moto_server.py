"""The stand-in for SQS does one thing at a time with a queue: moto's own server loses groups if it does two."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.sqs_station import is_there
from headgate.testing.brokers.station import WITHIN_S

QUEUE = "orders.fifo"
BLOCKED_S = 0.2  # what waits for a lock waits for longer than this


def test_a_deletion_within_a_receive_does_not_block_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there():
        skip_or_fail("moto, flask and flask-cors are not installed")
    from moto.sqs.models import Queue, SQSBackend

    from headgate.testing.brokers.moto_server import lock_queues

    class Locked(SQSBackend): ...  # type: ignore[misc, unused-ignore]

    lock_queues(Locked)
    backend = Locked("eu-west-1", "123456789012")
    backend.create_queue(QUEUE, FifoQueue="true")
    for body in ("first", "second"):
        backend.send_message(QUEUE, body, {}, deduplication_id=body, group_id="group")
    (lent,) = backend.receive_message(QUEUE, 1, 0, 1)
    backend.change_message_visibility(QUEUE, str(lent.receipt_handle), 0)
    deletion = threading.Thread(target=backend.delete_message, args=(QUEUE, lent.receipt_handle))
    pending = vars(Queue)["pending_messages"].fget

    def pending_while_another_deletes(queue: Queue) -> Any:
        if deletion.ident is None:
            deletion.start()
            deletion.join(BLOCKED_S)
        return pending(queue)

    monkeypatch.setattr(Queue, "pending_messages", property(pending_while_another_deletes))
    (again,) = backend.receive_message(QUEUE, 1, 0, 1)
    deletion.join()
    assert again.body == "first"
    (behind,) = backend.receive_message(QUEUE, 1, int(WITHIN_S), 1)
    assert behind.body == "second"
