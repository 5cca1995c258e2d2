"""Pictures of graphs: no box lies on another, and every edge leads from the left to the right."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest

from headgate.web.layout import BOX_H, BOX_W, Layouts, lay_out


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


def test_a_graph_that_is_the_same_is_laid_out_once() -> None:
    layouts = Layouts()
    assert layouts.of({"a": [], "b": ["a"]}) is layouts.of({"a": [], "b": ["a"]})
    assert layouts.of({"a": []}) is not layouts.of({"b": []})
