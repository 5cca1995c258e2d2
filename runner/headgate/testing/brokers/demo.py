"""The demo with a real broker: the crash test of its adapter, with kills of runner, supervisor and broker.

``headgate demo --broker NAME`` runs this module in a process of its own::

    python -m headgate.testing.brokers.demo FOLDER --broker NAME --events N --kills K --subscribers S --seed SEED

The broker is a private server in that folder, of whose program this machine must have one. What passes between it and
headgate is read by a proxy. Beside the kills, some messages fail in a subscriber, and have to come again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from rich.console import Console

from headgate.testing.brokers.station import CONNECTION, Station
from headgate.testing.crash.campaign import crash_test
from headgate.testing.crash.commands import PairFailed
from headgate.testing.crash.report import CrashTestFailed
from headgate.testing.demo import DATABASE_VARIABLE, NOT_PROVEN, run_program

BROKERS = ("redis", "postgres", "rabbitmq", "nats", "kafka")
MESSAGE_BYTES_MAX = 100_000  # the stations' own limit is for tests


class NoBroker(Exception):
    """No broker can be started here; the text says why."""


@contextlib.contextmanager
def running_station(broker: str, folder: Path) -> Generator[Station]:
    """Give a private server with an empty source on it: one of `BROKERS`, or another that has a station.

    ``folder`` is made. Nothing is left running. Raises `NoBroker`.
    """
    try:
        station = _started(broker, folder)
    except ModuleNotFoundError as missing:
        raise NoBroker(f"this needs an extra: {missing}") from None
    if station is None:
        raise NoBroker(f"this machine has no program of a server of {broker}")
    try:
        station.create()
        if broker.startswith("rabbitmq"):
            # A quorum queue that is younger than the last clean start of its node does not survive a kill.
            assert station.server is not None
            station.server.stop()
            station.server.start()
        yield station
    finally:
        try:
            station.close()
        finally:
            if station.server is not None:
                station.server.close()  # a node of RabbitMQ outlives its station, as several may use it


def _started(broker: str, folder: Path) -> Station | None:
    # Each imports a client, of which only one need be installed.
    folder.mkdir()
    match broker:
        case "postgres":
            from headgate.testing.brokers import postgres_server, postgres_station

            if problem := postgres_server.why_none():
                raise NoBroker(problem)
            return postgres_station.PostgresStation()
        case "rabbitmq" | "rabbitmq-classic":
            from headgate.testing.brokers import rabbitmq_station

            server = rabbitmq_station.find_server()
            if server is None:
                return None
            folder.parent.chmod(0o711)  # a node that root starts runs as another user
            node = rabbitmq_station.RabbitNode(folder, server)
            node.start()
            return rabbitmq_station.RabbitStation(node, is_quorum=broker == "rabbitmq")
        case "kafka":
            from headgate.testing.brokers import kafka_station

            server = kafka_station.find_server()
            return None if server is None else kafka_station.KafkaStation(folder, server)
        case "nats":
            from headgate.testing.brokers import nats_station

            server = nats_station.find_server()
            return None if server is None else nats_station.NatsStation(folder, server)
        case "mqtt":
            from headgate.testing.brokers import mqtt_station

            server = mqtt_station.find_server()
            return None if server is None else mqtt_station.MqttStation(folder, server)
        case "sqs" | "sqs-fifo":
            from headgate.testing.brokers import sqs_station

            if not sqs_station.is_there():
                raise NoBroker("moto, flask and flask-cors are not installed")
            moto = sqs_station.MotoServer(folder)
            moto.start()
            return sqs_station.SqsStation(moto, is_fifo=broker == "sqs-fifo", owns_server=True)
        case "webhook":
            from headgate.testing.brokers import webhook_station

            return webhook_station.WebhookStation()
        case _:
            from headgate.testing.brokers import redis_station

            server = redis_station.find_server()
            return None if server is None else redis_station.RedisStation(folder, server)


def prove(broker: str, folder: Path, events: int, kills: int, subscribers: int, seed: int, out: Console) -> bool:
    """Run the demo in an empty folder, print its report, and return whether all is well."""
    database = os.environ.get(DATABASE_VARIABLE)
    try:
        with running_station(broker, folder / "broker") as station:
            assert station.server is not None
            report = crash_test(
                station.trigger(message_bytes_max=MESSAGE_BYTES_MAX),
                station,
                messages=events,
                kills=kills,
                subscribers=subscribers,
                settings={f"conn_{CONNECTION}": station.uri, **({"database_url": database} if database else {})},
                seed=seed,
                folder=folder / "crash",
                kill_broker=station.server.crash,
                on_kill=lambda kill: out.print(f"SIGKILL: {kill}", markup=False),
            )
    except NoBroker as error:
        out.print(f"the demo cannot be run: {error}", markup=False)
        return False
    except CrashTestFailed as failed:
        out.print(str(failed), markup=False)
        return False
    except PairFailed as failure:
        out.print(f"the demo failed: {failure}", markup=False)
        return False
    out.print(str(report), markup=False)
    once = "once" if station.key_is_stable else "at least once, as this broker gives messages no name,"
    out.print(f"Every message was stored {once} for every subscriber, and none was acknowledged before.")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.testing.brokers.demo")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--broker", choices=BROKERS, required=True)
    for name in ("events", "kills", "subscribers", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = vars(parser.parse_args(arguments))
    out = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    return 0 if prove(**given, out=out) else NOT_PROVEN


if __name__ == "__main__":
    run_program(main)
