"""The exact optimum of a tiny step, over all orders of all stages, by search.

Theory of operation. A schedule is built operation by operation in order of their starts, each beginning as soon as
its stage is free and its input is there, but not before the one built before it. Every schedule that starts nothing
later than it must arises so, and one of those is optimal. Steps of equal *done* sets have the same future but for
the times at which stages become free and inputs arrive; so the search goes layer by layer, one operation more in
each, and keeps for each done set only partial schedules of which none is as early in all of these times as another.
Two more rules thin it out:

- Nothing begins at or after the time at which another available operation, begun now, would have ended: that one
  could be moved before it. (Not true of forwards that take a place under the limit; they count for nothing here.)
- What lower bounds show to be no better than a schedule known already is dropped. Such schedules are found by the
  same search with only the most promising few of each layer kept, more and more until none had to be dropped.

A limit applies to the order only, since places are taken and given back by dispatches on the same stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rrfp_jax.core.hints import Hint
from rrfp_jax.core.scheduler import StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, Task
from rrfp_jax.sim.bounds import one_machine
from rrfp_jax.sim.costs import Costs
from rrfp_jax.sim.operations import Operation, operations


@dataclass(frozen=True)
class Optimum:
    """The shortest makespan (s) and, per stage, an order that has it."""

    makespan: float
    orders: tuple[tuple[Task, ...], ...]


@dataclass(eq=False, slots=True)
class _Partial:
    """A partial schedule. Times are not before the start of the operation built last.

    Attributes:
        done: set of the operations built, as bits.
        starts: earliest starts of the operations that can be built now, by index.
        free: when each stage becomes free.
        bound: no completion of it is shorter.
        built: operation built last.
        parent: the partial schedule without that one.
    """

    done: int
    starts: dict[int, float]
    free: tuple[float, ...]
    bound: float
    built: int = -1
    parent: _Partial | None = None

    def times(self) -> tuple[float, ...]:
        """What its future depends on, besides what is done."""
        return (*self.free, *(self.starts[o] for o in sorted(self.starts)))


def optimum(rules: StepRules, costs: Costs, *, most: int = 1_000_000) -> Optimum:
    """The best of all orders that split the same backwards and keep to the same limit in flight.

    The limit applies to hints only, as in the core, and its reserve for lower microbatches (`core/admission.py`)
    is left out: what fits may be admitted. The order in which gradients are added is left out, too.

    Args:
        rules: of the step.
        costs: of its tasks and transfers, which must not depend on the order.
        most: partial schedules to look at before giving up.

    Raises:
        ValueError: the search takes more than `most`, or what the core refuses of the rules.
    """
    return _Search(rules, costs, most).run()


class _Search:
    def __init__(self, rules: StepRules, costs: Costs, most: int) -> None:
        self._operations = operations(rules, costs)
        self._stages = rules.placement.stages
        self._limit = rules.limit if isinstance(rules.schedule, Hint) else None
        self._left = self._most = most
        index = {id(o): at for at, o in enumerate(self._operations)}
        self._followers: list[list[int]] = [[] for _ in self._operations]
        self._first: list[int] = []
        for at, o in enumerate(self._operations):
            if o.follows is None:
                self._first.append(at)
            else:
                self._followers[index[id(o.follows)]].append(at)
        self._on_stage = [[at for at, o in enumerate(self._operations) if o.stage == s] for s in range(self._stages)]
        self._best: _Partial | None = None

    def run(self) -> Optimum:
        starts = {at: 0.0 for at in self._first}
        root = _Partial(0, starts, (0.0,) * self._stages, self._bound(0, starts, (0.0,) * self._stages))
        width = 30
        while not self._layers(root, width):
            width *= 10
        assert self._best is not None
        orders: list[list[Task]] = [[] for _ in range(self._stages)]
        partial: _Partial | None = self._best
        while partial.parent is not None:
            o = self._operations[partial.built]
            orders[o.stage].append(o.task)
            partial = partial.parent
        return Optimum(self._best.bound, tuple(tuple(reversed(order)) for order in orders))

    def _layers(self, root: _Partial, width: int) -> bool:
        whole = True
        layer = [root]
        for _ in self._operations:
            layer = self._undominated(child for partial in layer for child in self._children(partial))
            if len(layer) > width:
                whole = False
                layer = sorted(layer, key=lambda p: p.bound)[:width]
        for p in layer:
            if p.bound < self._incumbent():
                self._best = p
        return whole or (self._best is not None and self._best.bound <= root.bound * (1 + 1e-12))

    def _incumbent(self) -> float:
        return self._best.bound if self._best else float("inf")

    def _children(self, partial: _Partial) -> Iterator[_Partial]:
        o = self._operations
        admitted = [at for at in partial.starts if self._admits(partial.done, at)]
        latest = min(
            (
                (partial.starts[at] + o[at].duration, partial.starts[at])
                for at in admitted
                if self._limit is None or o[at].task.kind is not FORWARD or o[at].task.chunk > 0
            ),
            default=(float("inf"), 0.0),
        )
        for at in admitted:
            start = partial.starts[at]
            if start < latest[0] or start == latest[1]:
                child = self._with(partial, at)
                self._left -= 1
                if child.bound < self._incumbent():
                    yield child
        if self._left < 0:
            raise ValueError("too large")

    def _with(self, partial: _Partial, at: int) -> _Partial:
        o = self._operations
        now = partial.starts[at]
        stage, end = o[at].stage, now + o[at].duration
        free = tuple(max(now, t) if s != stage else end for s, t in enumerate(partial.free))
        starts = {k: max(free[o[k].stage], t) for k, t in partial.starts.items() if k != at}
        for k in self._followers[at]:
            starts[k] = max(free[o[k].stage], end + o[k].lag)
        done = partial.done | 1 << at
        bound = max(partial.bound, self._bound(done, starts, free))
        return _Partial(done, starts, free, bound, at, partial)

    def _bound(self, done: int, starts: dict[int, float], free) -> float:
        o = self._operations
        heads: dict[int, float] = {}
        bound = max(free)
        todo = list(starts)
        for at in todo:
            heads[at] = starts[at]
            bound = max(bound, starts[at] + o[at].duration + o[at].tail)
        while todo:
            at = todo.pop()
            for k in self._followers[at]:
                heads[k] = max(heads[at] + o[at].duration + o[k].lag, free[o[k].stage])
                todo.append(k)
        if bound >= self._incumbent():
            return bound
        for stage in self._on_stage:
            bound = max(bound, one_machine((heads[k], o[k].duration, o[k].tail) for k in stage if k in heads))
        return bound

    def _admits(self, done: int, at: int) -> bool:
        o = self._operations
        task = o[at].task
        if self._limit is None or task.kind is not FORWARD or task.chunk > 0:
            return True
        begun, left = set(), set()
        for k in self._on_stage[o[at].stage]:
            if done >> k & 1:
                begun.add(o[k].task.microbatch)
            elif o[k].task.kind is not INPUT:
                left.add(o[k].task.microbatch)
        return len(begun & left) < self._limit

    @staticmethod
    def _undominated(partials: Iterator[_Partial]) -> list[_Partial]:
        found: dict[int, list[tuple[tuple[float, ...], _Partial]]] = {}
        for p in partials:
            times = p.times()
            rivals = found.setdefault(p.done, [])
            if any(all(a <= b for a, b in zip(other, times)) for other, _ in rivals):
                continue
            rivals[:] = [r for r in rivals if not all(a <= b for a, b in zip(times, r[0]))]
            rivals.append((times, p))
        return [p for rivals in found.values() for _, p in rivals]
