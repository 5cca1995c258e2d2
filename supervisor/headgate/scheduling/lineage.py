"""The tasks upstream and downstream of others in a DAG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def related(
    upstream_of: Mapping[str, Sequence[str]], task_ids: Iterable[str], *, upstream: bool, downstream: bool
) -> set[str]:
    """Return these tasks, with all that is upstream, downstream, or both, of any of them, at whatever distance.

    ``upstream_of`` has the direct upstream tasks of each task of the DAG; ids that it lacks have no relatives.
    """
    found = set(task_ids)
    roots = frozenset(found)
    if upstream:
        found |= _reached(upstream_of, roots)
    if downstream:
        downstream_of: dict[str, list[str]] = {}
        for task_id, above in upstream_of.items():
            for one in above:
                downstream_of.setdefault(one, []).append(task_id)
        found |= _reached(downstream_of, roots)
    return found


def _reached(edges: Mapping[str, Sequence[str]], roots: Iterable[str]) -> set[str]:
    reached: set[str] = set()
    pending = list(roots)
    while pending:
        for one in edges.get(pending.pop(), ()):
            if one not in reached:
                reached.add(one)
                pending.append(one)
    return reached
