"""What a rank may do, by rules written down a second time, so that a wrong rule in the core cannot hide."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import NamedTuple

from rrfp_jax.core.events import Arrived, Dispatch, Room
from rrfp_jax.core.hints import Ranked
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Input, Placement, Task
from tests.support.drain import Drain


class Broken(AssertionError):
    """Something that must never happen, in words."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Broken` if a condition does not hold."""
    if not holds:
        raise Broken(otherwise)


def virtual_stages(placement: Placement) -> list[tuple[int, int]]:
    """The (stage, chunk) of the model's virtual stages in the order in which a microbatch passes them."""
    down = list(range(placement.stages))
    return [
        (stage, chunk)
        for chunk in range(placement.chunks)
        for stage in (down if placement.shape == "looped" or chunk % 2 == 0 else reversed(down))
    ]


class Seen(NamedTuple):
    """What happened on a rank."""

    arrived: frozenset[Input]
    dispatched: frozenset[Task]
    added: frozenset[tuple[int, int]]
    ends: tuple[int, ...]
    held: frozenset[tuple[int, int]]


class Witness:
    """Judges what one rank does: each task once, dependencies, limits, the order of gradients, idleness."""

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None) -> None:
        self._rules, self._chunks = rules, range(rules.placement.chunks)
        order = virtual_stages(rules.placement)
        places = [order.index((stage, chunk)) for chunk in self._chunks]
        self._first = {chunk for chunk in self._chunks if places[chunk] == 0}
        self._last = {chunk for chunk in self._chunks if places[chunk] == len(order) - 1}
        self._split: Collection[tuple[int, int]] = ()
        if rules.hint is not None:
            self._split = set(rules.hint.split(stage, rules.placement, rules.microbatches))
        self._order: Sequence[Task] = ()
        if isinstance(rules.hint, Ranked) and rules.hint.reserve:
            self._order = rules.hint.order.order(stage, rules.placement, rules.microbatches)
        self._whole = rules.forward_only or not (rules.hint is None or rules.hint.by_chunk)
        ones, zeros = [1] * rules.microbatches, [0] * rules.microbatches
        self._limits: list[tuple[Sequence[Sequence[int]], int]] = []
        if budget:
            self._limits.append((budget.costs, budget.limit))
        if budget and budget.most is not None:
            self._limits.append(([ones, *[zeros] * (len(self._chunks) - 1)], budget.most))
        self._drain = rules.hint if isinstance(rules.hint, Drain) else None
        if rules.limit is not None:
            self._limits.append(([ones] * len(self._chunks), rules.limit * len(self._chunks)))

    def start(self) -> Seen:
        """Nothing yet."""
        return Seen(frozenset(), frozenset(), frozenset(), (0,) * self._rules.microbatches, frozenset())

    def complete(self, seen: Seen) -> bool:
        """Whether every task has been dispatched and every gradient added."""
        rules, chunks = self._rules, len(self._chunks)
        wanted = 0 if rules.forward_only else rules.microbatches * chunks
        forwards = sum(task.kind is FORWARD for task in seen.dispatched)
        whole = all(ends == chunks for ends in seen.ends)
        return whole and forwards == rules.microbatches * chunks and len(seen.added) == wanted

    def after(self, seen: Seen, event: object, dispatch: Dispatch | None) -> Seen:
        """What has happened after an event and what it led to."""
        if isinstance(event, Arrived):
            require(event.input not in seen.arrived, f"the input of {event.input} comes twice")
            seen = seen._replace(arrived=seen.arrived | {event.input})
        if dispatch is not None:
            if isinstance(event, Room) and dispatch.task.input in event.foreseen:
                seen = self.after(seen, Arrived(dispatch.task.input), None)
            seen = self._dispatched(seen, dispatch.task)
            for microbatch in dispatch.additions:
                seen = self._added(seen, dispatch.task.chunk, microbatch)
            if self._rules.hint:
                self._check_limits(seen)
        return seen

    def check_idle(self, seen: Seen) -> None:
        """Refuse that nothing runs under a hint with admission although something could."""
        rules = self._rules
        if rules.hint and self._drain is None:
            for chunk, microbatch in product(self._chunks, range(rules.microbatches)):
                able = self._able(seen, chunk, microbatch)
                require(able is None, f"nothing runs, but {able} could")

    def _dispatched(self, seen: Seen, task: Task) -> Seen:
        kind, chunk, microbatch = task
        require(task not in seen.dispatched, f"{task} runs twice")
        forward, backward, first = (Task(k, chunk, microbatch) for k in (FORWARD, BACKWARD, INPUT))
        if kind is FORWARD:
            require(self._there(seen, task), f"{task} runs before its activation is there")
        elif kind is WEIGHT:
            require(first in seen.dispatched, f"{task} runs before {first}")
        else:
            require(forward in seen.dispatched, f"{task} runs before {forward}")
            there = chunk in self._last or backward.input in seen.arrived
            require(there, f"{task} runs before its gradient is there")
            require(not {backward, first} & seen.dispatched, f"{task} runs, but it has run as B or I")
        held, ends = seen.held, seen.ends
        if kind in (BACKWARD, WEIGHT) or self._rules.forward_only:
            ends = (*ends[:microbatch], ends[microbatch] + 1, *ends[microbatch + 1 :])
        if self._whole:
            whole = {(each, microbatch) for each in self._chunks}
            held = held - whole if ends[microbatch] == len(self._chunks) else held | whole
        elif kind is FORWARD:
            held |= {(chunk, microbatch)}
        elif kind is not INPUT:
            held -= {(chunk, microbatch)}
        return seen._replace(dispatched=seen.dispatched | {task}, ends=ends, held=held)

    def _added(self, seen: Seen, chunk: int, microbatch: int) -> Seen:
        name = f"the gradient of microbatch {microbatch}, chunk {chunk},"
        ends = {Task(kind, chunk, microbatch) for kind in (BACKWARD, WEIGHT)}
        require(bool(ends & seen.dispatched), f"{name} is added before it is computed")
        require((chunk, microbatch) not in seen.added, f"{name} is added twice")
        in_turn = microbatch == 0 or (chunk, microbatch - 1) in seen.added
        require(in_turn or self._rules.accumulation == "arrival", f"{name} is added out of turn")
        return seen._replace(added=seen.added | {(chunk, microbatch)})

    def _check_limits(self, seen: Seen) -> None:
        rules, parked = self._rules, self._parked(seen)
        for costs, limit in self._limits:
            held = sum(costs[chunk][j] for chunk, j in seen.held)
            require(held <= limit, f"{held} is held where the limit is {limit}")
        if self._drain is not None:
            held = sum(task.kind is FORWARD for task in seen.dispatched) - sum(seen.ends)
            most = self._drain.limit + (len(self._chunks) if len(self._chunks) > 1 else 0)
            require(held <= most, f"{held} forwards have no backward, limit {self._drain.limit}")
        require(parked <= rules.spare_gradients, f"{parked} gradients are parked")

    def _parked(self, seen: Seen) -> int:
        return 0 if self._rules.forward_only else sum(seen.ends) - len(seen.added)

    def _able(self, seen: Seen, chunk: int, microbatch: int) -> Task | None:
        """The task of a chunk and microbatch that could run now, if there is one."""
        forward, backward, first, weight = (
            Task(kind, chunk, microbatch) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)
        )
        if forward not in seen.dispatched:
            there = self._there(seen, forward)
            return forward if there and self._admits(seen, forward) and self._spares(seen, forward) else None
        if self._rules.forward_only:
            return None
        split = (chunk, microbatch) in self._split
        run = first if split else backward
        if run not in seen.dispatched:
            there = chunk in self._last or backward.input in seen.arrived
            return run if there and (split or self._has_place(seen, chunk, microbatch)) else None
        if split and weight not in seen.dispatched and self._has_place(seen, chunk, microbatch):
            return weight
        return None

    def _admits(self, seen: Seen, forward: Task) -> bool:
        """Whether an F leaves the stage safe: the rules of core/admission.py, for every microbatch."""
        if self._whole:
            return forward.chunk > 0 or self._admits_whole(seen, forward.microbatch)
        held = seen.held | {forward[1:]}
        begun = {task[1:] for task in seen.dispatched if task.kind is FORWARD} | {forward[1:]}
        for costs, limit in self._limits:
            for q in range(self._rules.microbatches):
                if seen.ends[q] == len(self._chunks):
                    continue
                to_come = sum(costs[c][q] for c in self._chunks if (c, q) not in begun)
                if to_come + sum(costs[c][k] for c, k in held if k >= q) > limit:
                    return False
        return True

    def _admits_whole(self, seen: Seen, microbatch: int) -> bool:
        waiting = [j for j in range(microbatch) if Task(FORWARD, 0, j) not in seen.dispatched]
        for costs, limit in self._limits:
            dear = [sum(own) for own in zip(*costs, strict=True)]
            held = sum(costs[c][j] for c, j in seen.held)
            if held + dear[microbatch] + max((dear[j] for j in waiting), default=0) > limit:
                return False
        return True

    def _spares(self, seen: Seen, forward: Task) -> bool:
        """Whether an F leaves the order the room that it needs: the rule of core/hints.py."""
        unfinished = [q for q, ends in enumerate(seen.ends) if ends < len(self._chunks)]
        if not self._order or forward.microbatch == unfinished[0]:
            return True
        lower = [Task(FORWARD, forward.chunk, j) for j in range(forward.microbatch)]
        lower = [task for task in lower if task not in seen.dispatched and self._there(seen, task)]
        if any(self._admits(seen, task) for task in lower):
            return False  # of each chunk only the lowest may run ahead
        left = [task for task in self._order if task not in seen.dispatched]
        if forward == left[0]:
            return True
        frees = [at for at, task in enumerate(self._order) if task.kind in (BACKWARD, WEIGHT)]
        before = self._order[: max(self._order.index(forward), frees[0])]  # at least the warm-up
        for costs, limit in self._limits:
            held = costs[forward.chunk][forward.microbatch] + sum(costs[c][k] for c, k in seen.held)
            for kind, chunk, j in (task for task in before if task not in seen.dispatched):
                held += {FORWARD: 1, INPUT: 0}.get(kind, -1) * costs[chunk][j]
                if held > limit and kind is FORWARD:
                    return False
        return True

    def _there(self, seen: Seen, forward: Task) -> bool:
        return forward.chunk in self._first or forward.input in seen.arrived

    def _has_place(self, seen: Seen, chunk: int, microbatch: int) -> bool:
        if self._rules.accumulation == "arrival":
            return True
        in_turn = microbatch == 0 or (chunk, microbatch - 1) in seen.added
        return in_turn or self._parked(seen) < self._rules.spare_gradients
