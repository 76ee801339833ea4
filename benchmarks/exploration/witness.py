"""What a rank may do, by rules written down a second time, so that a wrong rule in the core cannot hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rrfp_jax.core.events import Accumulate, Arrived, Dispatch
from rrfp_jax.core.rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task

RELEASING = (BACKWARD, WEIGHT)


class Broken(AssertionError):
    """Something that must never happen, in words."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Broken` if a condition does not hold."""
    if not holds:
        raise Broken(otherwise)


def pieces(placement: Placement) -> list[tuple[int, int]]:
    """The (stage, chunk) of the model's pieces in the order in which a microbatch passes them."""
    down = list(range(placement.stages))
    return [
        (stage, chunk)
        for chunk in range(placement.chunks)
        for stage in (down if placement.shape == "looped" or chunk % 2 == 0 else reversed(down))
    ]


class Seen(NamedTuple):
    """What happened on a rank: inputs, tasks, and (chunk, microbatch) of the gradients added."""

    arrived: frozenset[Task] = frozenset()
    dispatched: frozenset[Task] = frozenset()
    added: frozenset[tuple[int, int]] = frozenset()


class Witness:
    """Judges what one rank does: each task once, dependencies, limits, the order of gradients."""

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None) -> None:
        self.stage, self.rules, self.budget = stage, rules, budget
        self._pieces = pieces(rules.placement)

    def after(self, seen: Seen, event: object, instructions: Iterable[object]) -> Seen:
        """What has happened after an event and what it led to.

        Raises:
            Broken: that must never happen.
        """
        if isinstance(event, Arrived):
            require(event.task not in seen.arrived, f"the input of {event.task} comes twice")
            seen = seen._replace(arrived=seen.arrived | {event.task})
        tasks = 0
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                tasks += 1
                require(tasks == 1, "two tasks are dispatched at once")
                self._check_task(seen, instruction.task)
                seen = seen._replace(dispatched=seen.dispatched | {instruction.task})
            elif isinstance(instruction, Accumulate):
                self._check_added(seen, *instruction)
                seen = seen._replace(added=seen.added | {(instruction.chunk, instruction.microbatch)})
        if tasks:
            self._check_limits(seen)
        return seen

    def complete(self, seen: Seen) -> bool:
        """Whether every task has been dispatched and every gradient added."""
        counts = Counter(task.kind for task in seen.dispatched)
        ends = counts[BACKWARD] + counts[WEIGHT]
        wanted = self.rules.microbatches * self.rules.placement.chunks
        return counts[FORWARD] == ends == len(seen.added) == wanted

    def _check_task(self, seen: Seen, task: Task) -> None:
        require(task not in seen.dispatched, f"{task} runs twice")
        kind, chunk, microbatch = task
        v = self._pieces.index((self.stage, chunk))
        forward, backward, first = (Task(k, chunk, microbatch) for k in (FORWARD, BACKWARD, INPUT))
        if kind is FORWARD:
            require(v == 0 or task in seen.arrived, f"{task} runs before its activation is there")
        elif kind is WEIGHT:
            require(first in seen.dispatched, f"{task} runs before {first}")
        else:
            require(forward in seen.dispatched, f"{task} runs before {forward}")
            last = v == len(self._pieces) - 1
            require(last or backward in seen.arrived, f"{task} runs before its gradient is there")
            require(not {backward, first} & seen.dispatched, f"{task} runs, but it has run as B or I")

    def _check_added(self, seen: Seen, chunk: int, microbatch: int) -> None:
        name = f"the gradient of microbatch {microbatch}, chunk {chunk},"
        ends = {Task(kind, chunk, microbatch) for kind in RELEASING}
        require(bool(ends & seen.dispatched), f"{name} is added before it is computed")
        require((chunk, microbatch) not in seen.added, f"{name} is added twice")
        before = sum(c == chunk for c, _ in seen.added)
        require(self.rules.accumulation == "arrival" or microbatch == before, f"{name} is added out of turn")

    def _check_limits(self, seen: Seen) -> None:
        rules, chunks = self.rules, self.rules.placement.chunks
        if rules.hint is None:
            return
        ended = Counter(task.microbatch for task in seen.dispatched if task.kind in RELEASING)
        held = {t.microbatch for t in seen.dispatched if t.kind is FORWARD and ended[t.microbatch] < chunks}
        if rules.limit is not None:
            if rules.drains:
                counted = sum(task.kind is FORWARD for task in seen.dispatched) - ended.total()
                most = rules.limit + (chunks if chunks > 1 else 0)
            else:
                counted, most = len(held), rules.limit
            require(counted <= most, f"{counted} microbatches are in flight, limit {rules.limit}")
        if self.budget is not None:
            cost = sum(self.budget.costs[j] for j in held)
            require(cost <= self.budget.limit, f"{cost} bytes are held, limit {self.budget.limit}")
        if rules.accumulation == "index":
            parked = ended.total() - len(seen.added)
            require(parked <= rules.spare_gradients, f"{parked} gradients are parked")
