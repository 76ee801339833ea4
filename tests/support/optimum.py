"""The exact optimum of a tiny step, over all orders of all stages, by search.

Theory of operation. A schedule is built operation by operation, in order of their starts. Each one begins
when its stage is free and its input is there, but not before the one built last. Every schedule in which
nothing could begin earlier arises in this way. What a partial schedule can become depends on three things:
which operations are done, when each stage is free, and when each input is there. So the search goes by
layers, with one operation more in each. Of the partial schedules with the same operations done, it keeps
those that no other one beats or equals in all of these times.

- Nothing begins at or after the earliest time at which another operation, begun now, would have ended: that
  one could be put before it at no cost. Forwards that need a place under the limit are no such operations,
  since their microbatch would hold the place longer.
- A partial schedule is dropped if the one-machine bounds of `bounds.py` show that it becomes no better than
  the best schedule known. That schedule is found by the same search, which keeps only the most promising few
  of each layer at first, then more and more of them, until none had to be dropped because there was no space.

A step of 4 stages and 4 microbatches (32 tasks, or 44 with split backwards) mostly takes less than a
second on one core, one of 4 and 5 some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, Task
from rrfp_jax.studies.bounds import one_machine
from rrfp_jax.trace.costs import StepCosts
from tests.support.limits import operations

FIRST_WIDTH, WIDENING = 30, 10
"""How many partial schedules of a layer are kept, and how many times as many in each further search."""


@dataclass(frozen=True)
class Optimum:
    """The shortest makespan (s), and an order that has it."""

    makespan: float
    order: ListedOrder


def optimum(rules: StepRules, costs: StepCosts, *, most: int = 1_000_000) -> Optimum:
    """The best of all orders that split the same backwards and keep to the same limit in flight."""
    return _Search(rules, costs, most).run()


@dataclass(eq=False, slots=True)
class _Partial:
    """A partial schedule. All times are in seconds, and none is before the start of what was built last."""

    done: int
    starts: dict[int, float]
    free: tuple[float, ...]
    bound: float = 0.0
    built: int = -1
    before: _Partial | None = None


class _Search:
    def __init__(self, rules: StepRules, costs: StepCosts, most: int) -> None:
        self._rules, self._most, self._left = rules, most, most
        self._by_chunk = rules.charges_by_chunk
        self._limit = limit = rules.admission_limit  # places on each stage
        if limit is not None and self._by_chunk:
            self._limit = limit * rules.placement.chunks
        self._operations = found = operations(rules, costs)
        index = {o: at for at, o in enumerate(found)}
        self._followers: list[list[int]] = [[] for _ in found]
        # By stage, chunk (if that counts) and microbatch the operations that hold a place, as bits: it is
        # held if some are done, not all.
        self._places: list[dict[tuple[int, int], int]] = [{} for _ in range(rules.placement.stages)]
        for at, o in enumerate(found):
            if o.follows is not None:
                self._followers[index[o.follows]].append(at)
            if o.task.kind is not INPUT:
                places = self._places[o.stage]
                place = (o.task.chunk if self._by_chunk else 0, o.task.microbatch)
                places[place] = places.get(place, 0) | 1 << at
        self._best: _Partial | None = None

    def run(self) -> Optimum:
        free = (0.0,) * self._rules.placement.stages
        starts = {at: 0.0 for at, o in enumerate(self._operations) if o.follows is None}
        root = _Partial(0, starts, free)
        root.bound = self._bound(root)
        width = FIRST_WIDTH
        while not self._searched(root, width):
            width *= WIDENING
        assert self._best is not None  # microbatches can always pass one after another
        return Optimum(max(self._best.free), self._order(self._best))

    def _searched(self, root: _Partial, width: int) -> bool:
        """Search, keeping so many of each layer; whether nothing can be better than the best then."""
        complete, layer = True, [root]
        for _ in self._operations:
            layer = _undominated(child for partial in layer for child in self._children(partial))
            if self._left < 0:
                raise ValueError(
                    f"the optimum of {len(self._operations)} tasks takes more than {self._most} partial "
                    "schedules: give it more, or a smaller step"
                )
            if len(layer) > width:
                complete = False
                layer = sorted(layer, key=lambda partial: partial.bound)[:width]
        self._best = min([*layer, *([self._best] if self._best else [])], key=lambda p: p.bound, default=None)
        return complete or self._known <= root.bound

    @property
    def _known(self) -> float:
        return math.inf if self._best is None else self._best.bound

    def _children(self, partial: _Partial) -> Iterator[_Partial]:
        """The partial schedules with one operation more that may lead to a better schedule."""
        operations = self._operations
        possible = [at for at in partial.starts if self._admits(partial.done, at)]
        ends = [
            (partial.starts[at] + operations[at].duration, partial.starts[at])
            for at in possible
            if self._limit is None or not self._takes_place(operations[at].task)
        ]
        end, begun = min(ends, default=(math.inf, 0.0))
        for at in possible:
            if begun < end <= partial.starts[at]:
                continue
            self._left -= 1
            child = self._with(partial, at)
            if child.bound < self._known:
                yield child

    def _with(self, partial: _Partial, at: int) -> _Partial:
        built, now = self._operations[at], partial.starts[at]
        end = now + built.duration
        free = tuple(max(now, t) if s != built.stage else end for s, t in enumerate(partial.free))
        starts = {k: max(t, free[self._operations[k].stage]) for k, t in partial.starts.items() if k != at}
        for k in self._followers[at]:
            starts[k] = max(end + self._operations[k].lag, free[self._operations[k].stage])
        child = _Partial(partial.done | 1 << at, starts, free, partial.bound, at, partial)
        child.bound = max(child.bound, self._bound(child))
        return child

    def _bound(self, partial: _Partial) -> float:
        """What no completion beats: Jackson's schedule of what each stage has still to do."""
        operations, free = self._operations, partial.free
        heads = dict(partial.starts)
        todo = list(heads)
        while todo:
            at = todo.pop()
            end = heads[at] + operations[at].duration
            for k in self._followers[at]:
                heads[k] = max(end + operations[k].lag, free[operations[k].stage])
                todo.append(k)
        jobs: list[list[tuple[float, float, float]]] = [[] for _ in free]
        for at, head in heads.items():
            jobs[operations[at].stage].append((head, operations[at].duration, operations[at].tail))
        return max(*free, *map(one_machine, jobs))

    def _admits(self, done: int, at: int) -> bool:
        """Whether an operation finds a place under the limit."""
        if self._limit is None or not self._takes_place(self._operations[at].task):
            return True
        places = self._places[self._operations[at].stage].values()
        return sum(1 for tasks in places if done & tasks not in (0, tasks)) < self._limit

    def _takes_place(self, task: Task) -> bool:
        return task.kind is FORWARD and (self._by_chunk or task.chunk == 0)

    def _order(self, schedule: _Partial) -> ListedOrder:
        rows: list[list[Task]] = [[] for _ in schedule.free]
        partial = schedule
        while partial.before is not None:
            built = self._operations[partial.built]
            rows[built.stage].insert(0, built.task)
            partial = partial.before
        return ListedOrder(self._rules.placement, self._rules.microbatches, tuple(map(tuple, rows)))


def _undominated(partials: Iterable[_Partial]) -> list[_Partial]:
    """Those that no other with the same operations done beats or equals in all times."""
    found: dict[int, list[tuple[tuple[float, ...], _Partial]]] = {}
    for partial in partials:
        times = (*partial.free, *(partial.starts[at] for at in sorted(partial.starts)))
        rivals = found.setdefault(partial.done, [])
        if not any(_as_early(other, times) for other, _ in rivals):
            rivals[:] = [rival for rival in rivals if not _as_early(times, rival[0])]
            rivals.append((times, partial))
    return [partial for rivals in found.values() for _, partial in rivals]


def _as_early(times: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return all(mine <= other for mine, other in zip(times, others, strict=True))
