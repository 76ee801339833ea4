"""Visits of all states of a case, breadth first; what is wrong is told by the shortest way to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.verification.exploration.witness import Broken

Move = tuple[Any, Callable[[], Any]]
"""What happens, and what makes the world after it."""
Enough = Callable[[int], bool]
"""Whether so many states are enough."""


class Violation(AssertionError):
    """Something that must never happen, with what led to it."""


@dataclass(frozen=True)
class Reach:
    """How much was seen of a case, and whether that is all of it."""

    states: int
    moves: int
    whole: bool


def never(states: int) -> bool:
    """No number of states is enough."""
    return False


def visit(
    first: Any,
    moves: Callable[[Any], Iterable[Move]],
    enough: Enough,
    check: Callable[[Any], None] = lambda world: None,
    finished: Callable[[Any], bool] | None = None,
) -> Reach:
    """Visit all worlds from the first on; where ends are known, one must be within reach from everywhere."""
    number = {first.key(): 0}
    came: list[tuple[int, Any]] = [(0, "nothing")]  # by number of the state: the one before, what happened
    back: list[list[int]] = [[]]
    ends = [0] if finished and finished(first) else []
    queue, count = deque([(0, first)]), 0
    while queue:
        if enough(len(came)):
            return Reach(len(came), count, False)
        at, world = queue.popleft()
        done: Any = "nothing"
        try:
            check(world)
            for done, make in moves(world):
                new = make()
                count += 1
                to = number.setdefault(new.key(), len(came))
                if to == len(came):
                    came.append((at, done))
                    back.append([])
                    queue.append((to, new))
                    if finished and finished(new):
                        ends.append(to)
                back[to].append(at)
        except Broken as broken:
            raise Violation(f"{broken}, after: {_way(came, at, done)}") from broken
    if finished and (stuck := _stuck(back, ends)):
        raise Violation(f"deadlock, after: {_way(came, min(stuck))}")
    return Reach(len(came), count, True)


def _stuck(back: list[list[int]], ends: list[int]) -> set[int]:
    """The states from which no end can be reached."""
    free, todo = set(ends), list(ends)
    while todo:
        for state in back[todo.pop()]:
            if state not in free:
                free.add(state)
                todo.append(state)
    return set(range(len(back))) - free


def _way(came: list[tuple[int, Any]], state: int, *last: Any) -> str:
    names = list(last)
    while state:
        state, done = came[state]
        names.append(done)
    return ", ".join(map(str, reversed(names))) or "nothing"
