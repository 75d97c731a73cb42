"""The order in which pytest-xdist's processes take the tests."""

from __future__ import annotations

import pytest
from worker_order import long_first


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
@pytest.mark.parametrize(("count", "longs"), [(1, {0}), (3, {1, 2}), (40, {17, 18}), (16, {3, 9})])
def test_long_tests_begin_at_once(count, longs, workers):
    order = long_first(list(range(count)), [i in longs for i in range(count)], workers)
    assert sorted(order) == list(range(count))
    at, begins = 0, []
    for worker in range(workers):  # the parts that xdist gives to each worker
        begins += order[at : at + 1]
        at += (count - at) // (workers - worker)
    assert count < workers or longs <= set(begins)
