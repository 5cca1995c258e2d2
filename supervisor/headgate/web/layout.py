"""Where the boxes of a graph stand: layers from left to right, few crossings, straight lines where there is room.

A node stands one layer behind the last of those that it waits for. An edge over several layers passes through places of
its own. Sweeps order each layer by the mean place of its neighbours; then each box moves as near to that mean as the
others allow.

A graph of which that would draw more than `POINTS_MAX` is drawn with less, whatever its shape (`Lines`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from threading import Lock
from typing import Literal

import msgspec

BOX_W, BOX_H = 168, 34
GAP_X, GAP_Y = 56, 14
MARGIN = 12
SWEEPS = 6
POINTS_MAX = 6_000  # of all edges: an end each, and a place in each layer that they pass. A third of a megabyte
LAYOUTS_MAX = 50  # that are kept, of the graphs seen last

# Which edges are drawn: all, those that no longer path implies, or of those the ones of a single node.
Lines = Literal["all", "needed", "of one"]
Upstream = Mapping[str, Sequence[str]]  # the names that each waits for, all of which are in it; there is no cycle


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
    lines: Lines = "all"


class _Nodes:
    """The layers, with a place in each layer between for an edge that passes it: these have numbers for names."""

    def __init__(self, depth: Mapping[str, int], upstream: Upstream, *, bends: bool) -> None:
        """Place the nodes of ``depth``, with these edges; without ``bends`` an edge has no place between."""
        self.layers: list[list[str | int]] = []
        self.above: dict[str | int, list[str | int]] = {}
        self.paths: list[list[str | int]] = []
        for name, layer in depth.items():
            self._place(name, layer)
        number = 0
        for name, ups in upstream.items():
            for up in ups:
                path: list[str | int] = [up]
                for layer in range(depth[up] + 1, depth[name]) if bends else ():
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


def _in_order(upstream: Upstream) -> list[str]:
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


def _needed(order: Collection[str], upstream: Upstream) -> dict[str, list[str]]:
    """Return the edges that no longer path implies. ``order`` has each name after all that it waits for."""
    bit = {name: 1 << number for number, name in enumerate(order)}
    before: dict[str, int] = {}  # the bits of all that it waits for, over others as well
    needed = {}
    for name in order:
        beyond = 0
        for up in upstream[name]:
            beyond |= before[up]
        needed[name] = [up for up in upstream[name] if not bit[up] & beyond]
        before[name] = beyond
        for up in needed[name]:
            before[name] |= bit[up]
    return needed


def _points(depth: Mapping[str, int], upstream: Upstream) -> int:
    """Return how many points edges with bends have, as `POINTS_MAX` counts them."""
    return sum(depth[name] - depth[up] for name, ups in upstream.items() for up in ups)


def _placed(upstream: Upstream, around: str | None) -> tuple[_Nodes, Lines]:
    """Return the layers of a graph, with edges of at most `POINTS_MAX` points in all."""
    depth: dict[str, int] = {}
    for name in _in_order(upstream):
        depth[name] = max((depth[up] + 1 for up in upstream[name]), default=0)
    if _points(depth, upstream) <= POINTS_MAX:
        return _Nodes(depth, upstream, bends=True), "all"
    needed = _needed(depth, upstream)
    if _points(depth, needed) <= POINTS_MAX:
        return _Nodes(depth, needed, bends=True), "needed"
    if sum(map(len, needed.values())) <= POINTS_MAX:
        return _Nodes(depth, needed, bends=False), "needed"
    of_one = {name: [up for up in ups if around in (up, name)] for name, ups in needed.items()}
    return _Nodes(depth, of_one, bends=False), "of one"


def lay_out(upstream: Upstream, around: str | None = None) -> Layout:
    """Return where to draw a graph; if only the edges of one node can be drawn, these are those of ``around``."""
    nodes, lines = _placed(upstream, around)
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
    return _drawn(nodes, place, lines)


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


def _drawn(nodes: _Nodes, place: Mapping[str | int, float], lines: Lines) -> Layout:
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
    return Layout(boxes, edges, width, round(height, 1), lines)


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
    """The layouts of the graphs that were seen last, by all that they follow from. May be used by several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Layout] = OrderedDict()
        self._lock = Lock()
        self._making = Lock()

    def of(self, upstream: Upstream, around: str | None = None) -> Layout:
        """Return the layout of a graph, as `lay_out` does. One is made at a time; whoever wants the same waits."""
        key = sha256(msgspec.msgpack.encode((upstream, around))).digest()
        if (found := self._found(key)) is not None:
            return found
        with self._making:
            if (found := self._found(key)) is not None:  # made while this waited
                return found
            made = lay_out(upstream, around)
            with self._lock:
                self._kept[key] = made
                while len(self._kept) > LAYOUTS_MAX:
                    self._kept.popitem(last=False)
            return made

    def _found(self, key: bytes) -> Layout | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)
