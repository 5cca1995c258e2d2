"""The pages about signals."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable

from starlette.testclient import TestClient

from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store

Get = Callable[..., str]
LONG = {"none": None, "yes": True, "text": "it's", "long": "x" * 300 + "the end"}


def codes(text: str) -> list[str]:
    return [html.unescape(one) for one in re.findall(r"<code[^>]*>(.*?)</code>", text)]


def whole(text: str) -> str:
    (found,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    return html.unescape(found)


def test_values_are_json_and_the_whole_value_of_a_version_is_shown(page: Get, client: TestClient, store: Store) -> None:
    values = [json.dumps(value).encode() for value in (LONG, {"a": None}, "plain")]
    store.signals.send([NewSignal("k", value, f"d{number}", "ada") for number, value in enumerate(values)])
    (key,) = client.get("/signals.json").json()["rows"]
    place = f"/signals/{key['id']}"
    text = page(place)
    assert "Value of version 3" in text
    assert whole(text) == "plain"
    assert codes(text)[:2] == ['"plain"', '{"a":null}']
    assert codes(text)[2] == json.dumps(LONG, separators=(",", ":"))[:199] + "…"
    assert f'href="{place}?version=1"' in text
    text = page(place, version="1")
    assert "Value of version 1" in text
    assert json.loads(whole(text)) == LONG
    for none in ("0", "4", "9" * 18):
        assert client.get(place, params={"version": none}).status_code == 404


def test_a_password_is_masked_where_a_value_is_cut(page: Get, client: TestClient, store: Store) -> None:
    value = json.dumps("x" * 170 + " redis://u:" + "s3cret" * 20 + "@h").encode()
    store.signals.send([NewSignal("k", value, "d", "ada")])
    (key,) = client.get("/signals.json").json()["rows"]
    assert "s3cret" not in page(f"/signals/{key['id']}")
