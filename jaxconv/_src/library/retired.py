"""Kernel instances of former versions, whose names occur in exported programs."""

from __future__ import annotations

from typing import NamedTuple


class Retired(NamedTuple):
    """The replacement of a removed instance.

    Attributes:
        since: the first version without it.
        instead: the instances for its problems.
    """

    since: str
    instead: str


# By name. An instance of a published version must be added here when it is deleted.
RETIRED: dict[str, Retired] = {}


def advice(instance: str) -> str:
    """Advice for a program with an instance name that this version lacks."""
    what = "The program was exported by another version of jaxconv"
    if instance in RETIRED:
        since, instead = RETIRED[instance]
        what += f"; since {since} {instead} takes the place of this kernel"
    return f"{what}. Run it with the version that exported it, or export it again with this one."
