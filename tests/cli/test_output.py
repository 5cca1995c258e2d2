"""How values are printed, for programs and for people."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from headgate.cli.output import json_line, payload
from headgate.protocol.values import encode_value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, {"a": [1, 2.5, None, True, "x"]}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (10**4000, 10**4000),
        ([-(10**4300)], [hex(-(10**4300))]),
        ({10**4300: {10**5000}}, {f'"{hex(10**4300)}"': [hex(10**5000)]}),
        (timedelta(seconds=90), "0:01:30"),
        (Decimal("0.10"), "0.10"),
        (UUID(int=0), "00000000-0000-0000-0000-000000000000"),
        (b"text", "text"),
        (b"\xff\x00", "base64:/wA="),
        ((1, "a"), [1, "a"]),
        ({3, 1, 2}, [1, 2, 3]),
        ({(1, 2): "x"}, {"[1,2]": "x"}),
        (float("nan"), "nan"),
        (2**70, 2**70),
    ],
)
def test_every_kind_of_payload_is_printed_as_json(value: Any, shown: Any) -> None:
    printed = json_line(payload(encode_value(value, where="payload")))

    assert json.loads(printed) == shown
    assert "\n" not in printed


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b'{"$": "users.Type", "v": [1]}', {"$": "users.Type", "v": [1]}),
        (b"not json", "not json"),
        (b"\xff", "base64:/w=="),
        (None, None),
    ],
)
def test_a_payload_that_cannot_be_decoded_is_printed_as_it_is_stored(data: bytes | None, shown: Any) -> None:
    assert json.loads(json_line(payload(data))) == shown


def test_text_that_has_no_utf8_form_is_printed_with_escapes() -> None:
    assert json.loads(json_line({"a": ["\udcff"]})) == {"a": ["\\udcff"]}
