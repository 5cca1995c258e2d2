"""Outcomes of steps on the wire: each comes back as it was, and as what it was."""

from __future__ import annotations

import msgspec
import pytest

from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom

XCOMS = (XCom("return_value", b"[1]"), XCom("count", b"2"))


@pytest.mark.parametrize(
    "outcome",
    [
        StepSucceeded(),
        StepSucceeded(xcoms=XCOMS, skips=("a", "b")),
        StepSkipped(reason="nothing to do", xcoms=XCOMS),
        StepFailed(error="ValueError: x", traceback="Traceback", may_retry=False, xcoms=XCOMS),
        StepDeferred("a.Trigger", b"{}", "resumed", b'{"a":1}', 60.0, XCOMS),
    ],
)
def test_an_outcome_comes_back_as_it_was(outcome: StepOutcome) -> None:
    data = msgspec.msgpack.encode(outcome)
    assert msgspec.msgpack.Decoder[StepOutcome](StepOutcome).decode(data) == outcome


def test_a_failure_may_be_tried_again_unless_it_says_otherwise() -> None:
    assert StepFailed("error").may_retry
