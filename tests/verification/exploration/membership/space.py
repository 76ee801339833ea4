"""Visits all states of a case, breadth first; what is wrong is told by the shortest way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from rrfp_jax.runtime.run.membership import Membership
from tests.verification.exploration.membership.world import Case, Machine, World, moves, start
from tests.verification.exploration.slots.space import Reach, Violation
from tests.verification.exploration.witness import Broken

Way: TypeAlias = tuple[Any, ...]
"""The way before and a move; empty at the start."""


def explore(
    case: Case, machine: Machine = Membership, *, enough: Callable[[int], bool] = lambda states: False
) -> Reach:
    """Visit all states of a case, or as many as are enough."""
    first = start(case, machine)
    known: set[Hashable] = {first.key()}
    queue: deque[tuple[World, Way]] = deque([(first, ())])
    count = 0
    while queue:
        if enough(len(known)):
            return Reach(len(known), count, False)
        world, way = queue.popleft()
        done = "nothing"
        try:
            for done, new in moves(world):
                count += 1
                if (key := new.key()) not in known:
                    known.add(key)
                    queue.append((new, (way, done)))
        except Broken as broken:
            raise Violation(f"{broken}, after: {_told((way, done))}") from broken
    return Reach(len(known), count, True)


def _told(way: Way) -> str:
    names = []
    while way:
        way, name = way
        names.append(name)
    return ", ".join(reversed(names))
