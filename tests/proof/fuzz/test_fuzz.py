"""A little of ``python -m tests.proof.fuzz``: the same targets, a few hundred inputs each, the same ones every time."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.proof.fuzz import fuzz_targets
from tests.proof.fuzz.fuzz_inputs import mutated, seeds
from tests.proof.fuzz.fuzz_targets import MEMORY_BYTES_MAX, TARGETS, Broken, check

from headgate.protocol.link.framing import FrameReader
from headgate.protocol.link.runner_dialect import RUNNER_WIRE

pytestmark = pytest.mark.campaign

# Inputs a target is given in each test: so many take about a second on one core.
RUNS = {"framing": 400, "message": 400, "value": 400, "link-of-runner": 60, "frame-log": 60, "core": 20, "replay": 20}
RUNS_OTHERWISE = 200
SEEDS_TRIED_MAX = 4  # of a target, where each seed takes long


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What a core has to say of these inputs is of no use."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("target", TARGETS)
def test_the_inputs_to_begin_with_are_good(target: str) -> None:
    outcomes = [check(target, seed.data(), measured=True) for seed in seeds(target)[:SEEDS_TRIED_MAX]]
    assert outcomes
    if target != "message":  # of which some go the wrong way, deliberately
        assert [outcome for outcome in outcomes if "Error" in outcome or "Malformed" in outcome] == []


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_of_nobody_end_in_a_documented_error(target: str) -> None:
    @settings(
        max_examples=RUNS.get(target, RUNS_OTHERWISE) // 2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.binary(max_size=500))
    def try_bytes(data: bytes) -> None:
        check(target, data, measured=False)

    try_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_frames_end_in_a_documented_error(target: str) -> None:
    starts = seeds(target)

    @settings(
        max_examples=RUNS.get(target, RUNS_OTHERWISE),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(one=st.sampled_from(starts), other=st.sampled_from(starts), seed=st.integers(0, 2**32))
    def try_mutated(one: object, other: object, seed: int) -> None:
        data = mutated(one, other, random.Random(seed)).data()  # type: ignore[arg-type]
        check(target, data, measured=seed % 10 == 0)

    try_mutated()


# --- the fuzzing can fail ------------------------------------------------------------------------


def test_an_error_that_is_not_documented_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(role: object, body: bytes) -> object:
        raise KeyError("not documented")

    monkeypatch.setattr(RUNNER_WIRE, "decode", decode)
    with pytest.raises(Broken) as raised:
        check("message", b"\0x", measured=False)
    assert raised.value.data == b"\0x"


def test_a_reader_that_holds_more_than_a_frame_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameReader, "buffered_bytes", property(lambda reader: 10**6))
    with pytest.raises(Broken):
        check("framing", b"\x01" + b"\0\0\0\x01x", measured=False)


def test_memory_beyond_the_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "message", lambda data: str(len(bytearray(2 * MEMORY_BYTES_MAX))))
    with pytest.raises(Broken) as raised:
        check("message", b"", measured=True)
    assert "bytes of memory for an input of 0" in str(raised.value.__cause__)


def test_a_value_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter(range(10))
    monkeypatch.setattr(fuzz_targets, "decode_value", lambda data: next(counted))
    with pytest.raises(Broken):
        check("value", b"1", measured=False)
