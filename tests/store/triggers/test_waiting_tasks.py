"""The tasks of claimed triggers: found by ranges of ids, of which only those are read that lie near to each other."""

from __future__ import annotations

import pytest

from headgate.store.triggers.waiting_tasks import GAP_MAX, _ranges

FAR = GAP_MAX + 1


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([5], [(5, 5)]),
        ([5, 6, 9], [(5, 9)]),
        ([5, 5 + GAP_MAX, 5 + 2 * GAP_MAX], [(5, 5 + 2 * GAP_MAX)]),
        ([5, 5 + FAR], [(5, 5), (5 + FAR, 5 + FAR)]),
        ([5, 6, 1_000_000, 1_000_001], [(5, 6), (1_000_000, 1_000_001)]),
    ],
)
def test_what_lies_far_from_each_other_is_asked_for_apart(ids: list[int], ranges: list[tuple[int, int]]) -> None:
    assert list(_ranges(ids)) == ranges
