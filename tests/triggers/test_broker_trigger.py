"""What the triggers of all brokers record: every argument of their constructor, by its name and in its order."""

from __future__ import annotations

import inspect

import pytest

from headgate.brokers.broker_trigger import BrokerTrigger
from headgate.brokers.kafka import KafkaTrigger
from headgate.brokers.mqtt import MqttTrigger
from headgate.brokers.nats import JetStreamTrigger
from headgate.brokers.postgres import PostgresOutboxTrigger
from headgate.brokers.rabbitmq import RabbitTrigger
from headgate.brokers.redis_streams import RedisStreamTrigger
from headgate.brokers.sqs import SqsTrigger
from headgate.brokers.webhooks import WebhookTrigger

GIVEN: dict[type[BrokerTrigger], tuple[str, ...]] = {
    KafkaTrigger: ("shop", "orders", "accounting"),
    MqttTrigger: ("shop", "orders/#", "accounting"),
    JetStreamTrigger: ("shop", "orders", "accounting"),
    PostgresOutboxTrigger: ("shop", "outbox"),
    RabbitTrigger: ("shop", "orders"),
    RedisStreamTrigger: ("shop", "orders", "accounting"),
    SqsTrigger: ("shop", "orders"),
    WebhookTrigger: ("shop", "orders", "standard"),
}


@pytest.mark.parametrize("cls", GIVEN)
def test_every_argument_is_recorded_and_makes_the_same_trigger(cls: type[BrokerTrigger]) -> None:
    bound = inspect.signature(cls).bind(*GIVEN[cls])
    bound.apply_defaults()
    trigger = cls(*GIVEN[cls])
    classpath, kwargs = trigger.serialize()
    assert classpath == f"{cls.__module__}.{cls.__name__}"
    assert list(kwargs.items()) == list(bound.arguments.items())
    restored = cls(**kwargs)
    assert restored.serialize() == (classpath, kwargs)
    assert restored.shared_stream_key() == trigger.shared_stream_key()
    assert restored.create_shared_stream_producer(kwargs).name
