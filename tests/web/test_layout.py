"""Pictures of graphs: no box lies on another, and every edge leads from the left to the right."""

from __future__ import annotations

import random
import re
import threading
from itertools import combinations
from typing import Any

import pytest

from headgate.web import layout as layout_module
from headgate.web.layout import BOX_H, BOX_W, POINTS_MAX, Layout, Layouts, lay_out


def drawn(upstream: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """Lay a graph out, check what holds for all, and return the places of its boxes."""
    layout = lay_out(upstream)
    at = {box.name: (box.x, box.y) for box in layout.boxes}
    assert at.keys() == upstream.keys()
    for (x, y), (other_x, other_y) in combinations(at.values(), 2):
        assert abs(x - other_x) >= BOX_W or abs(y - other_y) >= BOX_H
    assert all(0 <= x <= layout.width - BOX_W and 0 <= y <= layout.height - BOX_H for x, y in at.values())
    assert len(layout.edges) == sum(map(len, upstream.values()))
    for edge in layout.edges:
        ends = [float(number) for number in re.findall(r"[\d.]+", edge)]
        assert ends[0] < ends[-2], "it ends to the right of its begin"
    for name, ups in upstream.items():
        assert all(at[up][0] < at[name][0] for up in ups)
    return at


def test_a_chain_is_straight() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["b"]})
    assert len({y for _, y in at.values()}) == 1


def test_a_task_stands_between_those_that_it_waits_for() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    assert at["a"][1] == at["d"][1] == (at["b"][1] + at["c"][1]) / 2


def test_an_edge_over_layers_passes_beside_the_boxes_between() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["b", "a"]})
    (path,) = (edge for edge in lay_out({"a": [], "b": ["a"], "c": ["b", "a"]}).edges if "H" in edge)
    y = float(path.split("H")[0].split(" ")[-1])
    assert not at["b"][1] <= y <= at["b"][1] + BOX_H


def test_nothing_is_drawn_of_nothing() -> None:
    assert lay_out({}).boxes == ()


@pytest.mark.parametrize("seed", range(5))
def test_any_graph(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"t{i}" for i in range(60)]
    drawn({name: chance.sample(names[:i], min(i, chance.randrange(4))) for i, name in enumerate(names)})


def each_waits_for_all_before(count: int) -> dict[str, list[str]]:
    return {f"t{i}": [f"t{j}" for j in range(i)] for i in range(count)}


def each_waits_for_all_of_another_layer(count: int) -> dict[str, list[str]]:
    first = [f"a{i}" for i in range(count)]
    return {name: [] for name in first} | {f"b{i}": first for i in range(count)}


def behind_a_chain(count: int) -> dict[str, list[str]]:
    """Every edge of the two layers passes all tasks of a chain, and none is implied by others."""
    chain = {f"c{i}": [f"c{i - 1}"] if i else [] for i in range(count)}
    layers = each_waits_for_all_of_another_layer(count)
    return chain | {name: [*ups, f"c{count - 1}"] if ups else [] for name, ups in layers.items()}


def points(layout: Layout) -> int:
    return sum(edge.count("C") for edge in layout.edges)


def test_of_too_many_edges_those_that_others_imply_are_not_drawn() -> None:
    layout = lay_out(each_waits_for_all_before(290))
    assert (layout.lines, len(layout.boxes), points(layout)) == ("needed", 290, 289)
    assert {box.x for box in layout.boxes} == {12 + i * 224 for i in range(290)}, "each is in a layer of its own"
    few = lay_out(each_waits_for_all_before(20))
    assert (few.lines, len(few.edges)) == ("all", 190)


def test_of_far_too_many_edges_those_of_one_task_are_drawn() -> None:
    upstream = each_waits_for_all_of_another_layer(150)
    for around in ("a7", "b7"):
        layout = lay_out(upstream, around)
        assert (layout.lines, len(layout.boxes), len(layout.edges)) == ("of one", 300, 150)
    assert lay_out(upstream).edges == ()
    assert lay_out(each_waits_for_all_of_another_layer(70)).lines == "all"


def test_edges_that_would_bend_too_often_are_drawn_straight() -> None:
    layout = lay_out(behind_a_chain(70))
    assert (layout.lines, points(layout)) == ("needed", 69 + 70 * 70 + 70)
    assert len(layout.edges) == points(layout)


@pytest.mark.parametrize("seed", range(5))
def test_no_graph_has_more_points_than_the_limit(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"t{i}" for i in range(300)]
    upstream = {name: chance.sample(names[:i], chance.randrange(i + 1)) for i, name in enumerate(names)}
    assert sum(map(len, upstream.values())) > POINTS_MAX
    assert points(lay_out(upstream, "t7")) <= POINTS_MAX


class Turns:
    """A lock that says when somebody asks for it while somebody has it."""

    def __init__(self, is_waited_for: threading.Event) -> None:
        self._lock = threading.Lock()
        self._is_waited_for = is_waited_for

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_graph_that_is_asked_for_twice_at_a_time_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other_is_there, made, layouts = threading.Event(), [], Layouts()
    layouts._making = Turns(other_is_there)  # type: ignore[assignment]
    other = threading.Thread(target=lambda: made.append(layouts.of({"a": []})))

    def counted(*graph: Any) -> Layout:
        if other.ident is None:
            other.start()
            other_is_there.wait()
        else:
            other_is_there.set()
        return lay_out(*graph)

    monkeypatch.setattr(layout_module, "lay_out", counted)
    first = layouts.of({"a": []})
    other.join()
    assert made[0] is first


def test_a_graph_that_is_the_same_is_laid_out_once() -> None:
    layouts = Layouts()
    assert layouts.of({"a": [], "b": ["a"]}) is layouts.of({"a": [], "b": ["a"]})
    assert layouts.of({"a": []}) is not layouts.of({"b": []})
    assert layouts.of({"a": [], "b": ["a"]}, "a") is not layouts.of({"a": [], "b": ["a"]}, "b")
