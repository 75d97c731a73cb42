"""The order in which pytest-xdist distributes tests to processes."""

from __future__ import annotations


def long_first(items: list, long: list[bool], workers: int) -> list:
    """Orders tests so that the long ones start first, each on a different worker.

    ``--dist worksteal`` gives each worker an equal part of the tests, in their order. A worker that
    is done takes over the second half of another's part.
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
