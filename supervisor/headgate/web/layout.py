"""Where the boxes of a graph stand: layers from left to right, few crossings, straight lines where there is room.

A node stands one layer behind the last of those that it waits for. An edge over several layers passes through places of
its own. Sweeps order each layer by the mean place of its neighbours; then each box moves as near to that mean as the
others allow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock

import msgspec

BOX_W, BOX_H = 168, 34
GAP_X, GAP_Y = 56, 14
MARGIN = 12
SWEEPS = 6
LAYOUTS_MAX = 200  # that are kept, of the graphs seen last


class Box(msgspec.Struct, frozen=True):
    """A node, by its upper left corner."""

    name: str
    x: float
    y: float


class Layout(msgspec.Struct, frozen=True):
    """Boxes, the paths of the edges as SVG has them, and the size of the whole."""

    boxes: tuple[Box, ...]
    edges: tuple[str, ...]
    width: float
    height: float


class _Nodes:
    """The layers, with a place in each layer between for an edge that passes it: these have numbers for names."""

    def __init__(self, upstream: Mapping[str, Sequence[str]]) -> None:
        self.layers: list[list[str | int]] = []
        self.above: dict[str | int, list[str | int]] = {}
        self.paths: list[list[str | int]] = []
        depth: dict[str, int] = {}
        for name in _in_order(upstream):
            depth[name] = max((depth[up] + 1 for up in upstream[name]), default=0)
            self._place(name, depth[name])
        number = 0
        for name, ups in upstream.items():
            for up in ups:
                path: list[str | int] = [up]
                for layer in range(depth[up] + 1, depth[name]):
                    number += 1
                    self._place(number, layer)
                    self.above[number].append(path[-1])
                    path.append(number)
                self.above[name].append(path[-1])
                self.paths.append([*path, name])
        self.below: dict[str | int, list[str | int]] = {node: [] for node in self.above}
        for node, ups_of in self.above.items():
            for one in ups_of:
                self.below[one].append(node)

    def _place(self, node: str | int, layer: int) -> None:
        while len(self.layers) <= layer:
            self.layers.append([])
        self.layers[layer].append(node)
        self.above[node] = []


def _in_order(upstream: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names, each after all that it waits for. There is no cycle."""
    left = {name: len(ups) for name, ups in upstream.items()}
    below: dict[str, list[str]] = {name: [] for name in upstream}
    for name, ups in upstream.items():
        for up in ups:
            below[up].append(name)
    ready = [name for name, count in left.items() if not count]
    for name in ready:
        for one in below[name]:
            left[one] -= 1
            if not left[one]:
                ready.append(one)
    return ready


def lay_out(upstream: Mapping[str, Sequence[str]]) -> Layout:
    """Return where to draw a graph; ``upstream`` has the names that each waits for, all of which are in it."""
    nodes = _Nodes(upstream)
    place: dict[str | int, float] = {node: float(i) for layer in nodes.layers for i, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        beside = nodes.above if sweep % 2 == 0 else nodes.below
        for layer in nodes.layers if sweep % 2 == 0 else reversed(nodes.layers):
            means = {node: _mean([place[one] for one in beside[node]], place[node]) for node in layer}
            layer.sort(key=lambda node: means[node])
            place |= {node: float(i) for i, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        beside = nodes.above if sweep % 2 == 0 else nodes.below
        for layer in nodes.layers if sweep % 2 == 0 else reversed(nodes.layers):
            wanted = [_mean([place[one] for one in beside[node]], place[node]) for node in layer]
            place |= dict(zip(layer, _apart(wanted), strict=True))
    return _drawn(nodes, place)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _apart(wanted: Sequence[float]) -> list[float]:
    """Return places nearest to those wanted, each 1 or more beyond the one before; those that collide move as one."""
    blocks: list[list[float]] = []  # the sum of what its members want of its first place, and their number
    for index, place in enumerate(wanted):
        blocks.append([place - index, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    starts = [total / count for total, count in blocks for _ in range(int(count))]
    return [start + index for index, start in enumerate(starts)]


def _drawn(nodes: _Nodes, place: Mapping[str | int, float]) -> Layout:
    least = min(place.values(), default=0.0)
    at: dict[str | int, tuple[float, float]] = {}
    for number, layer in enumerate(nodes.layers):
        for node in layer:
            x = MARGIN + number * (BOX_W + GAP_X)
            at[node] = (x, round(MARGIN + (place[node] - least) * (BOX_H + GAP_Y), 1))
    boxes = tuple(Box(node, *at[node]) for node in at if isinstance(node, str))
    edges = tuple(_edge([at[node] for node in path]) for path in nodes.paths)
    width = 2 * MARGIN + max(len(nodes.layers), 1) * (BOX_W + GAP_X) - GAP_X
    height = 2 * MARGIN + max((y for _, y in at.values()), default=0.0) - MARGIN + BOX_H
    return Layout(boxes, edges, width, round(height, 1))


def _edge(points: Sequence[tuple[float, float]]) -> str:
    x, y = points[0]
    drawn = f"M{x + BOX_W:g} {y + BOX_H / 2:g}"
    for index, (to_x, to_y) in enumerate(points[1:], 1):
        middle, y_mid = to_x - GAP_X / 2, to_y + BOX_H / 2
        drawn += f"C{middle:g} {y + BOX_H / 2:g} {middle:g} {y_mid:g} {to_x:g} {y_mid:g}"
        if index < len(points) - 1:
            drawn += f"H{to_x + BOX_W:g}"
        y = to_y
    return drawn


class Layouts:
    """The layouts of the graphs that were seen last, by all that they follow from."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[tuple[str, tuple[str, ...]], ...], Layout] = OrderedDict()
        self._lock = Lock()

    def of(self, upstream: Mapping[str, Sequence[str]]) -> Layout:
        """Return the layout of a graph."""
        key = tuple((name, tuple(ups)) for name, ups in upstream.items())
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = lay_out(upstream)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > LAYOUTS_MAX:
                self._kept.popitem(last=False)
        return made
