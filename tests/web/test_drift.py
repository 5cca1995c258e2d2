"""Drift on the page of a stream: what was found, what its broker has said, and the forms that ask and accept."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient
from tests.store.harness import QUEUES, Query, describe_stream
from tests.web.test_acting import act, acts_of
from tests.web.test_acting import users as users

from headgate.protocol.messages.runner import DescribedLane, DescribedStream, LaneProgress
from headgate.store.ids import Epoch
from headgate.store.store import Store


@pytest.fixture
def epoch(store: Store) -> Epoch:
    return describe_stream(store)


def test_what_was_found_is_shown_until_it_is_accepted(
    users: dict[str, TestClient], page: Callable[..., str], store: Store, epoch: Epoch, query: Query
) -> None:
    stream_id = store.inspect.find_stream("orders")
    place, client = f"/streams/{stream_id}", users["operator"]
    assert "where headgate has left it" not in page(place), "nobody has asked"
    assert act(client, "streams drift", stream=str(stream_id)).headers["location"].startswith(f"{place}?act=")
    assert "it is asked since" in page(place)
    assert store.poll(epoch, QUEUES).describe == ["d"]

    def lane(at: int, begun_at: float, *, is_ours: bool) -> LaneProgress:
        return LaneProgress("0", (at,), begun_at, advanced=(at,), asked=(at,), is_ours=is_ours)

    store.note_drift(epoch, {"d": (lane(40, 1.0, is_ours=True),)}, {})
    lanes = (DescribedLane("0", end=(1_009,), committed=(1_007,), lag=2, oldest_key="the oldest"),)
    answer = {"d": DescribedStream("d", lanes, 1)}
    assert store.note_drift(epoch, {"d": (lane(1_007, 2.0, is_ours=False),)}, answer) == {"d": "moved by others"}
    shown = page(place)
    for words in ("lane 0: moved by others, from 40 to 1007", "1009", "the oldest", "its broker has answered"):
        assert words in shown
    assert "it is asked since" not in shown
    overview = page("/")
    assert "the log: moved by others" in overview
    assert f'href="{place}"' in overview

    assert "Accept what was found" in client.get(place).text
    assert "Accept what was found" not in users["viewer"].get(place).text
    asked = act(client, "streams drift", stream=str(stream_id), accepts="yes")
    assert (asked.status_code, "lane 0: moved by others, from 40 to 1007" in asked.text) == (200, True)
    assert "moved by others" in page(place), "it was only asked"
    # What nobody has been told of is not accepted.
    (up_to,) = re.findall(r'name="up_to" value="([^"]+)"', asked.text)
    form = {"stream": str(stream_id), "accepts": "yes", "confirmed": "1", "up_to": up_to}
    other = LaneProgress("1", (9,), 3.0, advanced=(9,), asked=(9,), is_ours=False)
    store.note_drift(epoch, {"d": (lane(1_007, 2.0, is_ours=True), LaneProgress("1", (1,), 1.0, advanced=(1,)))}, {})
    store.note_drift(epoch, {"d": (lane(1_007, 2.0, is_ours=True), other)}, {})
    assert act(client, "streams drift", **form).status_code == 303
    assert "lane 0: moved" not in page(place)
    assert "lane 1: moved by others, from 1 to 9" in page(place)
    for no_moment in ("soon", "nan"):
        assert act(client, "streams drift", **(form | {"up_to": no_moment})).status_code == 400
    assert act(client, "streams drift", **(form | {"up_to": "9e99"})).status_code == 303
    assert "moved by others" not in page(place)
    assert "moved by others" not in page("/")
    store.note_drift(epoch, {}, answer)
    assert "behind" in page(place)
    assert "Accept what was found" not in client.get(place).text
    assert act(client, "streams drift", stream="4711").status_code == 404
    assert act(client, "streams drift", stream="4711", accepts="yes").status_code == 400
    told = [row[3:] for row in acts_of(query) if row[0] == "operator"]
    assert told == [("streams drift", f"stream {stream_id}", "done")] * 3
