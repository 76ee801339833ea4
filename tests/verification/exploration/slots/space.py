"""Visits all states of a case, breadth first, and checks each; what is wrong is told by the shortest way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tests.verification.exploration.slots.moves import Action, actions, after
from tests.verification.exploration.slots.world import REAL, Case, Makers, World, start
from tests.verification.exploration.witness import Broken


class Violation(AssertionError):
    """Something that must never happen, with what led to it."""


@dataclass(frozen=True)
class Reach:
    """How much was seen of a case, and whether that is all of it."""

    states: int
    moves: int
    whole: bool


def explore(
    case: Case,
    makers: Makers = REAL,
    *,
    enough: Callable[[int], bool] = lambda states: False,
    check: Callable[[World], None] = lambda world: None,
) -> Reach:
    """Visit all states of a case, or as many as are enough."""
    world = start(case, makers)
    number: dict[Hashable, int] = {world.key(): 0}
    came: list[tuple[int, Action]] = [(0, ())]  # by number of the state: the one before, and what happened
    back: list[list[int]] = [[]]
    ends = [0] if world.finished() else []
    queue, moves = deque([(0, world)]), 0
    while queue:
        if enough(len(came)):
            return Reach(len(came), moves, False)
        at, world = queue.popleft()
        action: Action = ()
        try:
            check(world)
            for action in actions(world):
                new = after(world, action)
                moves += 1
                to = number.setdefault(new.key(), len(came))
                if to == len(came):
                    came.append((at, action))
                    back.append([])
                    queue.append((to, new))
                    if new.finished():
                        ends.append(to)
                back[to].append(at)
        except Broken as broken:
            raise Violation(f"{broken}, after: {_way(came, at)}, {_name(action)}") from broken
    if stuck := _stuck(back, ends):
        raise Violation(f"deadlock, after: {_way(came, min(stuck))}")
    return Reach(len(came), moves, True)


def _stuck(back: list[list[int]], ends: list[int]) -> set[int]:
    """The states from which no end can be reached."""
    free, todo = set(ends), list(ends)
    while todo:
        for state in back[todo.pop()]:
            if state not in free:
                free.add(state)
                todo.append(state)
    return set(range(len(back))) - free


def _way(came: list[tuple[int, Action]], state: int) -> str:
    names = []
    while state:
        state, action = came[state]
        names.append(_name(action))
    return ", ".join(reversed(names)) or "nothing"


def _name(action: Action) -> str:
    return " ".join(str(part) for part in action).rstrip("_")
