"""The errors of producers whose broker is a server."""

from __future__ import annotations

from headgate.streams.contract import SourceMissing


class BrokerError(Exception):
    """A broker, or the code of its adapter, did something that ends the stream."""


class BrokerMisconfigured(BrokerError):
    """The broker, or the user's settings for it, must be changed: connecting again would not help.

    Among these are a wrong password, a missing permission, a stream that does not exist any more, and settings of the
    broker with which messages would be lost.
    """


class BrokerSourceMissing(BrokerMisconfigured, SourceMissing):
    """The broker does not have what is read: the topic, the stream or the group does not exist, or not any more."""


class BrokerUnreachable(BrokerError):
    """The broker was in trouble for longer than the producer's ``give_up_s``; ``__cause__`` is the last failure."""

    def __init__(self, broker: str, give_up_s: float) -> None:
        super().__init__(f"{broker} could not be used for {give_up_s:g} s, in spite of repeated attempts to connect")
        self.broker = broker
        self.give_up_s = give_up_s
