"""The messages of gRPC are those of the ``.proto`` that is shipped, and a page and a call of the largest size fit."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from headgate.protocol import signal_rpc
from headgate.protocol.messages.signals import (
    DEDUP_CHARS_MAX,
    NAMESPACE_CHARS_MAX,
    SENDS_BYTES_MAX,
    SENDS_MAX,
    SIGNAL_BYTES_MAX,
    SIGNAL_KEY_CHARS_MAX,
)
from headgate.protocol.signal_rpc import signals_pb2 as pb

ROOT = Path(__file__).parents[2]
PROTO = "headgate/protocol/signal_rpc/signals.proto"
WIDEST = "\U0001f600"  # four bytes


def test_the_proto_is_shipped() -> None:
    text = files("headgate.protocol.signal_rpc").joinpath("signals.proto").read_text()
    assert "service Signals {" in text
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    paths = [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert paths == [signal_rpc.SEND, signal_rpc.LIST, signal_rpc.LISTEN]


@pytest.mark.parametrize("name", ["signals_pb2.py", "signals_pb2.pyi"])
def test_the_generated_modules_are_those_of_the_proto(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protocol")]
    subprocess.run([*command, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO], check=True)
    written = (tmp_path / PROTO).with_name(name).read_text()
    assert (ROOT / "protocol" / PROTO).with_name(name).read_text() == written, "`make proto` writes it"


def test_the_largest_call_fits() -> None:
    value = b"x" * (SENDS_BYTES_MAX // SENDS_MAX)
    largest = pb.NewSignal(
        key=WIDEST * SIGNAL_KEY_CHARS_MAX,
        namespace=WIDEST * NAMESPACE_CHARS_MAX,
        dedup=WIDEST * DEDUP_CHARS_MAX,
        value=value,
    )
    assert pb.SendRequest(signals=[largest] * SENDS_MAX).ByteSize() < signal_rpc.REQUEST_BYTES_MAX


def test_the_largest_page_fits() -> None:
    small = pb.Signal(
        version=2**62,
        value=b"x" * 1024,
        sender=WIDEST * 1000,
        dedup=WIDEST * DEDUP_CHARS_MAX,
        run=pb.Run(dag=WIDEST * 250, run_id=WIDEST * 250),
        sent_at_s=1.5,
    )
    last = pb.Signal(value=b"x" * SIGNAL_BYTES_MAX)
    assert pb.ListenResponse(signals=[*[small] * 1000, last]).ByteSize() < signal_rpc.RESPONSE_BYTES_MAX
