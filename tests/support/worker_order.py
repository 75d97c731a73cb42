"""The order of tests that pytest-xdist spreads over processes."""

from __future__ import annotations


def long_first(items: list, long: list[bool], workers: int) -> list:
    """The tests in an order in which the long ones begin at once, each on a worker of its own.

    ``--dist worksteal`` gives each worker an equal part of the tests, in their order. One that is
    done takes over the later half of another's.
    """
    first = [item for item, each in zip(items, long, strict=True) if each]
    rest = [item for item, each in zip(items, long, strict=True) if not each]
    order: list = []
    for worker in range(workers):
        size = (len(items) - len(order)) // (workers - worker)
        part = first[worker::workers][:size]
        count = size - len(part)
        order += part + rest[:count]
        del rest[:count]
    taken = set(map(id, order))
    return order + [item for item in items if id(item) not in taken]
