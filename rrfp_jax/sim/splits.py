"""Whether a run should go on with another split of its layers: measured steps in, a decision out.

`Balance` is told of the steps that ran with the present split whenever it asked to be. It knows no clock, no
process and no device: a run's rank 0 has one, and so has whoever simulates a run.

1. What layers take, and which stages are slow, is fitted to the busy times of all splits that have run
   (`trace/layers.py`), so every move teaches it something.
2. A *screen* follows from that alone: how much less the busiest stage could have to do. Below what is asked,
   that is all, and it costs a few milliseconds.
3. Else some splits are simulated on steps that ran. The best must gain what is asked in the earlier half of
   the steps and in the later one, each by its own times: what is noise, or over, is not in both.
4. It must save more in the rest of the run than the move takes.
5. After a move the gain is measured. Where it is less than half of what was promised, twice as much is asked
   for from then on. Where steps are slower beyond their noise, the layers go back if that pays, and do not go
   there again, so it cannot flap. A move is judged by steps with the schedule and the shapes of those before
   it. If a stage's part of the work has changed, all verdicts are forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.step_rules import Budget
from rrfp_jax.core.tasks import Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import StepCosts, TableCosts
from rrfp_jax.trace.layers import (
    BusySample,
    LayerShares,
    Work,
    busy_seconds,
    fitted_shares,
    layer_shares,
    least_largest,
    shares_of,
)
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.trace.replayed import ReplayInputs, replay_of

Split: TypeAlias = tuple[int, ...]
"""Numbers of layers, by virtual stage."""


class Recut(NamedTuple):
    """Another split, and the layer that moves if only one does."""

    change: str
    moved: int | None
    split: Split


@dataclass(frozen=True)
class Layers:
    """A model's layers with what they take, found from steps that ran."""

    work: Work
    shares: LayerShares
    placement: Placement

    @classmethod
    def of(cls, steps: Sequence[RecordedStep]) -> Layers | None:
        """From the steps that ran as the last one did; None if it is not known what layers have to do."""
        work, placement = steps[-1].work(), steps[-1].rules.placement
        if work is None:
            return None
        busy = busy_seconds([step.trace for step in steps if step.rules.placement == placement])
        return cls(work, layer_shares(work, busy, placement), placement)

    @property
    def split(self) -> Split:
        return tuple(self.work.split)

    @cached_property
    def least(self) -> Split:
        """The split whose busiest virtual stage has least to do."""
        until = [0.0, *accumulate(self.shares.seconds)]

        def seconds(v: int, first: int, end: int) -> float:
            return self._slowness(v) * (until[end] - until[first])

        return tuple(least_largest(seconds, len(self.work.layers), len(self.work.split))[1])

    def busiest(self, split: Sequence[int]) -> float:
        """What the busiest stage computes with a split."""
        found = [0.0] * self.placement.stages
        for v, own in enumerate(self.work.ranges(split)):
            found[self.placement.place(v)[0]] += self._busy(v, own)
        return max(found)

    def recuts(self) -> Iterator[Recut]:
        """The split whose slowest virtual stage takes least, and the slowest one's ends moved."""
        ranges = self.work.ranges()
        of, moves = max(range(len(ranges)), key=lambda v: self._busy(v, ranges[v])), []
        for to, layer in ((of - 1, ranges[of].start), (of + 1, ranges[of].stop - 1)):
            if not 0 <= to < len(ranges) or len(ranges[of]) < 2:
                continue
            there, here = self.placement.place(to)[0], self.placement.place(of)[0]
            if there != here:  # as they are where a V turns
                split = tuple(len(r) - (v == of) + (v == to) for v, r in enumerate(ranges))
                change = f"layer {layer} ({self.work.layers[layer].name}) on stage {there} instead of {here}"
                moves.append(Recut(change, layer, split))
        if self.least not in (self.split, *(move.split for move in moves)):
            best, present = (",".join(map(str, split)) for split in (self.least, self.split))
            yield Recut(f"split {best} instead of {present}", None, self.least)
        yield from moves

    def _slowness(self, v: int) -> float:
        return self.shares.slowness[self.placement.place(v)[0]]

    def _busy(self, v: int, layers: range) -> float:
        """What a virtual stage with these layers takes."""
        return self._slowness(v) * sum(self.shares.seconds[layers.start : layers.stop])

    def recut(self, step: RecordedStep, costs: TableCosts, split: Split) -> tuple[StepCosts, RecordedStep]:
        """The step's costs and its budgets with another split of the same layers."""
        ranges = self.work.ranges(split)
        own = self.placement.virtual_stage
        durations = {(s, t): self._seconds(costs, s, t, ranges[own(s, t.chunk)]) for s, t in costs.durations}
        budgets = step.budgets and [self._budget(step.budgets, s, ranges) for s in range(len(step.budgets))]
        return replace(costs, durations=durations), replace(step, budgets=budgets)

    def _seconds(self, costs: TableCosts, stage: int, task: Task, layers: range) -> float:
        """Seconds of a task that has these layers."""
        found = 0.0
        for i in layers:
            was, chunk = self.placement.place(self.work.virtual_stage_of[i])
            speed = self.shares.slowness[stage] / self.shares.slowness[was]
            # A first virtual stage may have no I, and runs a fused B.
            seconds = costs.known(was, task._replace(chunk=chunk)) or 0.0
            found += self.shares.of_time[i] * speed * seconds
        return found

    def _budget(self, budgets: Sequence[Budget | None], stage: int, ranges: Sequence[range]) -> Budget | None:
        """The budget of a stage whose chunks have these layers: their charges, and what weights leave."""
        if (budget := budgets[stage]) is None:
            return None
        charges, room = [], budget.limit
        for chunk in range(self.placement.chunks):
            v = self.placement.virtual_stage(stage, chunk)
            for layers, sign in ((self.work.ranges()[v], 1), (ranges[v], -1)):
                room += sign * sum(self.work.layers[i].lasting_bytes for i in layers)
            row = [0.0] * len(budget.costs[chunk])
            for i in ranges[v]:
                was, its_chunk = self.placement.place(self.work.virtual_stage_of[i])
                charged = budgets[was] or budget
                for j, own in enumerate(charged.costs[its_chunk]):
                    row[j] += own * self.shares.of_bytes[i]
            charges.append([round(own) for own in row])
        return replace(budget, costs=charges, limit=room)


NEAR = 1.05
"""Splits whose busiest stage has no more than so many times the least to do are tried."""


def tried(layers: Layers) -> Iterator[Split]:
    """The split whose busiest virtual stage has least, those beside it, one layer moved; the best first."""
    best = layers.least
    found = {best: None}
    for v in range(len(best) - 1):
        for more in (1, -1):
            other = list(best)
            other[v], other[v + 1] = other[v] + more, other[v + 1] - more
            if min(other) > 0 and layers.busiest(other) <= NEAR * layers.busiest(best):
                found[tuple(other)] = None
    found |= {recut.split: None for recut in layers.recuts()}
    found.pop(layers.split, None)
    yield from sorted(found, key=layers.busiest)


def simulated(steps: Sequence[tuple[RecordedStep, ReplayInputs]], layers: Layers, split: Split) -> float:
    """What these steps, each with what it takes to run it again, would take in all; inf if one cannot run."""
    whole = 0.0
    for step, replay in steps:
        costs, other = layers.recut(step, replay.costs, split)
        try:
            trace = simulate(step.rules, costs, budgets=other.budgets, lead=step.lead, leads=replay.leads)
        except (ValueError, RuntimeError):  # it does not fit
            return inf
        whole += trace.makespan
    return whole


GAIN = 0.03
"""The share of a step that a move must save at first; beside it moves are not worth being noticed."""

PROMISED = 0.5
"""A move that saves a smaller part of what was expected of it has disappointed."""

WORTH = 2.0
"""A move must save so many times in the rest of the run what it takes."""

PAUSE = 2.0
"""Steps that a first move is foreseen to take."""

FIRST, MOST = 8, 64
"""Steps with a split before it is looked at, and between looks at most; twice as many from look to look."""

SIMULATED = 2
"""Steps of each half that are simulated."""

MOST_TASKS = 32_000
"""So many tasks are simulated to find the best splits on one step, but never fewer than `TRIED` splits."""

LARGE = 16
"""Where `MOST_TASKS` are at most so many steps, one step of each half is simulated, not `SIMULATED`."""

TRIED = 3
"""Splits that are simulated on more than the latest step."""

UNTRUSTED = 0.1
"""With a larger error of the replay nothing is predicted."""

KEPT = 6
"""Splits that are remembered."""

CHANGED = 0.1
"""If a stage has so much more or less of all work than it had with the same split, things have changed."""


class Move(NamedTuple):
    """A split to go on with."""

    before: Split  # the present one
    split: Split
    seconds: float  # that a step takes, the median
    expected: float  # seconds that it will take; as it did there if `back`
    back: bool = False  # layers go back to where they were

    @property
    def gain(self) -> float:
        """The share of a step that it saves."""
        return 1.0 - self.expected / self.seconds


class Verdict(NamedTuple):
    """What a move has brought: what a step takes now, the median (s)."""

    move: Move
    seconds: float

    @property
    def gain(self) -> float:
        """The share of a step that it saves; negative if it costs."""
        return 1.0 - self.seconds / self.move.seconds

    @property
    def kept(self) -> bool:
        """Whether it saves about what was promised."""
        return self.gain >= PROMISED * self.move.gain


class RebalanceDecision(NamedTuple):
    """What a look says."""

    again: int  # steps until the next one
    move: Move | None = None
    verdict: Verdict | None = None  # on the move before, if it is judged now
    distrusted: float | None = None  # the error of the replay, if for that nothing is predicted


class _Ran:
    """What steps took (s): the median, and how far from it they usually were; and what they consisted of."""

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        found = [step.trace.makespan for step in steps]
        self.seconds = median(found)
        self.spread = median(abs(one - self.seconds) for one in found)
        self.kinds = {(_order(step), len(step.buckets), bucket) for step in steps for bucket in step.buckets}

    def slower(self, before: _Ran) -> bool:
        """Whether they are by more than noise."""
        return self.seconds - before.seconds > self.spread + before.spread


@dataclass
class Balance:
    """Decides when layers move. It expects a first look after `FIRST` steps."""

    compile_seconds: float  # that compiling beside steps took for the latest move; at first, at the start
    pause: float | None = None  # seconds that the latest move took; before the first, `PAUSE` is foreseen
    _asked: float = GAIN
    _wait: int = FIRST
    _seen: dict[Split, BusySample] = field(default_factory=dict)
    _barred: set[Split] = field(default_factory=set)  # where steps were slower
    _refused: set[Split] = field(default_factory=set)  # which cannot be
    _looked: _Ran | None = None  # at these steps
    _made: tuple[Move, _Ran] | None = None  # after these steps, and not judged yet

    def look(self, steps: Sequence[RecordedStep], left: int) -> RebalanceDecision:
        """What is to be done before the next step."""
        now = self._looked = _Ran(steps)
        own = _sample(steps)
        if own is None:
            return RebalanceDecision(MOST)
        self._note(own)
        layers = self._fitted(steps[-1], own)
        verdict, back = self._judged(layers.split, now)
        if back is not None and self._pays(back, left):
            return RebalanceDecision(FIRST, back, verdict)
        self._wait = min(2 * self._wait, MOST)
        move, distrusted = self._best(layers, steps, now.seconds)
        if move is not None and not self._pays(move, left):
            move = None
        return RebalanceDecision(self._wait, move, verdict, distrusted)

    def moved(self, move: Move, pause: float, compile_seconds: float) -> None:
        """The move of the latest look has been made; both took so long (s), compiling beside steps."""
        assert self._looked is not None, "a look has proposed it"
        self._made, self._wait = (move, self._looked), FIRST
        self.pause, self.compile_seconds = pause, compile_seconds

    def failed(self, move: Move) -> None:
        """A move cannot be made: it is not proposed again."""
        self._refused.add(move.split)

    def _pays(self, move: Move, left: int) -> bool:
        """Whether it saves more in the steps that are left than it takes."""
        pause = PAUSE * move.seconds if self.pause is None else self.pause
        after = left - self.compile_seconds / move.seconds
        return (move.seconds - move.expected) * after >= WORTH * pause

    def _note(self, own: BusySample) -> None:
        """Remember how busy stages are; all that was found is forgotten if things have changed."""
        now, then = (shares_of(seen.busy) for seen in (own, self._seen.pop(own.split, own)))
        if any(abs(one - before) > CHANGED * before for one, before in zip(now, then, strict=True)):
            self._seen.clear()
            self._barred.clear()
            self._asked, self._made = GAIN, None
        self._seen[own.split] = own
        for oldest in [*self._seen][:-KEPT]:
            del self._seen[oldest]

    def _fitted(self, step: RecordedStep, own: BusySample) -> Layers:
        """What layers take by steps like this one and by those of earlier splits."""
        work, placement = step.work(), step.rules.placement
        assert work is not None, "else there is no sample"
        earlier = [seen for split, seen in self._seen.items() if split != own.split]
        return Layers(work, fitted_shares(work, [*earlier, own], placement), placement)

    def _judged(self, present: Split, now: _Ran) -> tuple[Verdict | None, Move | None]:
        """What the latest move has brought, and the way back if steps are slower; if that is known."""
        if self._made is None:
            return None, None
        move, before = self._made
        if move.split == present and before.kinds != now.kinds:  # a later look may see steps like those
            return None, None
        self._made = None
        if move.split != present:
            return None, None
        verdict = Verdict(move, now.seconds)
        if not verdict.kept:
            self._asked *= 2
        if move.back or not now.slower(before):
            return verdict, None
        self._barred.add(present)
        return verdict, Move(present, move.before, now.seconds, move.seconds, back=True)

    def _best(
        self, layers: Layers, steps: Sequence[RecordedStep], seconds: float
    ) -> tuple[Move | None, float | None]:
        """The best move that both halves of the steps are for; or the error for which there is none."""
        present, middle = layers.split, len(steps) // 2
        if 1.0 - layers.busiest(layers.least) / layers.busiest(present) < self._asked:
            return None, None
        halves = steps[:middle], steps[middle:]
        affordable = MOST_TASKS // len(steps[-1].trace.records)  # steps of that size
        each = SIMULATED if affordable > LARGE else 1
        shown = [[(step, replay_of(step.trace)) for step in own[-each:]] for own in halves]
        sample = [one for own in shown for one in own]
        now, measured = simulated(sample, layers, present), sum(step.trace.makespan for step, _ in sample)
        if (error := abs(now / measured - 1)) > UNTRUSTED:
            return None, error
        others = [split for split in tried(layers) if split not in self._barred | self._refused]
        latest = {split: simulated(sample[-1:], layers, split) for split in others[: max(TRIED, affordable)]}
        fastest = sorted(latest, key=latest.__getitem__)[:TRIED]
        seconds_of = {split: simulated(sample, layers, split) for split in fastest}
        if not seconds_of:
            return None, None
        best = min(seconds_of, key=seconds_of.__getitem__)
        for own, some in zip(halves, shown, strict=True):
            busy = _sample(own)
            assert busy is not None, "some of these steps' stages were busy"
            fit = self._fitted(own[-1], busy)
            if simulated(some, fit, best) > (1 - self._asked) * simulated(some, fit, present):
                return None, None
        return Move(present, best, seconds, seconds * seconds_of[best] / now), None


def _order(step: RecordedStep) -> Hashable:
    """What its tasks were ordered by; planned orders are alike."""
    schedule = step.rules.schedule
    return type(schedule) if isinstance(schedule, ListedOrder) else schedule


def _sample(steps: Sequence[RecordedStep]) -> BusySample | None:
    """How busy stages were; None if that says nothing of layers, or it is not known what these have to do."""
    work, busy = steps[-1].work(), busy_seconds([step.trace for step in steps])
    if work is None or not all(busy.get(v, 0.0) > 0 for v in range(len(work.split))):
        return None
    return BusySample(tuple(work.split), [busy[v] for v in range(len(work.split))])
