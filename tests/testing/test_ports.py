"""Ports of tests' servers: nobody else gets one by chance, and a server that is started again has its port again."""

from __future__ import annotations

import errno
import socket

import pytest

from headgate.testing.brokers.station import free_port

HOST = "127.0.0.1"


def listening(port: int, *, as_servers_do: bool) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, as_servers_do)
        listener.bind((HOST, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def test_a_port_is_kept_for_servers_that_ask_for_it() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError), socket.create_connection((HOST, port)):
        pass
    for _ in range(2):  # it listens, is killed, and listens again
        with listening(port, as_servers_do=True), socket.create_connection((HOST, port)) as connection:
            assert connection.getpeername() == (HOST, port)
    with pytest.raises(OSError, match="in use") as refused:
        listening(port, as_servers_do=False)
    assert refused.value.errno == errno.EADDRINUSE


def test_no_port_is_given_twice() -> None:
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == len(ports)
