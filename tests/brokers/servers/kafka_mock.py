"""The mock cluster of librdkafka, out of the library that the wheel of confluent-kafka has: errors on demand."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int16, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import confluent_kafka

# Numbers of requests.
PRODUCE, FETCH, METADATA, OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT = 0, 1, 3, 8, 11, 12
TEXT_BYTES = 512


def library() -> Any:
    """Load librdkafka, with the types of the functions used here."""
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    (path,) = folder.glob("librdkafka*.so*")
    loaded = ctypes.CDLL(str(path))
    loaded.rd_kafka_conf_new.restype = c_void_p
    loaded.rd_kafka_new.restype, loaded.rd_kafka_new.argtypes = c_void_p, [c_int, c_void_p, c_char_p, c_size_t]
    loaded.rd_kafka_destroy.argtypes = [c_void_p]
    loaded.rd_kafka_mock_cluster_new.restype = c_void_p
    loaded.rd_kafka_mock_cluster_new.argtypes = [c_void_p, c_int]
    loaded.rd_kafka_mock_cluster_destroy.argtypes = [c_void_p]
    loaded.rd_kafka_mock_cluster_bootstraps.restype = c_char_p
    loaded.rd_kafka_mock_cluster_bootstraps.argtypes = [c_void_p]
    loaded.rd_kafka_mock_topic_create.argtypes = [c_void_p, c_char_p, c_int, c_int]
    loaded.rd_kafka_mock_group_initial_rebalance_delay_ms.argtypes = [c_void_p, c_int32]
    loaded.rd_kafka_mock_broker_set_down.argtypes = [c_void_p, c_int32]
    loaded.rd_kafka_mock_broker_set_up.argtypes = [c_void_p, c_int32]
    loaded.rd_kafka_mock_broker_set_rtt.argtypes = [c_void_p, c_int32, c_int]
    loaded.rd_kafka_mock_push_request_errors_array.argtypes = [c_void_p, c_int16, c_size_t, POINTER(c_int)]
    return loaded


class MockCluster:
    """A cluster of one broker in this process; `close` it."""

    def __init__(self) -> None:
        self._library = library()
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._client = self._library.rd_kafka_new(0, self._library.rd_kafka_conf_new(), text, TEXT_BYTES)
        assert self._client, text.value
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, 1)
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self.address: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Make a topic."""
        assert self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1) == 0

    def fail(self, request: int, *codes: int) -> None:
        """Have the next requests of a kind answered with these errors."""
        array = (c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(self._cluster, request, len(codes), array)

    def take_down(self) -> None:
        """Have the broker refuse connections."""
        assert self._library.rd_kafka_mock_broker_set_down(self._cluster, 1) == 0

    def bring_up(self) -> None:
        """Have it accept them."""
        assert self._library.rd_kafka_mock_broker_set_up(self._cluster, 1) == 0

    def delay(self, milliseconds: int) -> None:
        """Have each answer wait for so long."""
        assert self._library.rd_kafka_mock_broker_set_rtt(self._cluster, 1, milliseconds) == 0

    def close(self) -> None:
        """End it."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)
