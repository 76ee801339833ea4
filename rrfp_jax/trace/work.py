"""What the layers of a model have to do, and from that and a step's times: which layer takes how long, on
which stages the same work takes longer.

What shapes say of a layer's time is right for layers that are alike, and may be off for others. So the layers
that most of the time is in, the blocks, are the measure: virtual stages that consist of nothing else should
take as long as shapes say beside each other. One that takes longer is on a slow device. In other virtual
stages the rest of the time is for the other layers, up to `FURTHEST` times what shapes say of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from statistics import fmean, median_low
from typing import NamedTuple

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.trace.records import StepTrace

FURTHEST = 3.0
"""So many times as long as shapes say, beside the blocks, an embedding or a loss may take."""


class LayerWork(NamedTuple):
    """One layer.

    Attributes:
        name: as others of its kind are called.
        estimate: what shapes and a data sheet say that a microbatch takes, forward and backward (s); only
            ratios of it count.
        held_bytes: of a microbatch, from its forward to its backward.
        lasting_bytes: by which the room for microbatches of the stage that it is on is smaller.
    """

    name: str
    estimate: float
    held_bytes: int
    lasting_bytes: int = 0


@dataclass(frozen=True)
class Work:
    """A model's layers in order, and how many of them each virtual stage has."""

    layers: Sequence[LayerWork]
    split: Sequence[int]

    def ranges(self, split: Sequence[int] | None = None) -> list[range]:
        """By virtual stage the indices of its layers, in this split or in another one."""
        sizes = self.split if split is None else split
        return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    @cached_property
    def virtual_stage_of(self) -> list[int]:
        """By layer."""
        return [v for v, layers in enumerate(self.ranges()) for _ in layers]

    @cached_property
    def measure(self) -> str:
        """The name of the layers that most of the time is in."""
        seconds: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            seconds[layer.name] += layer.estimate
        return max(seconds, key=seconds.__getitem__)


@dataclass(frozen=True)
class LayerShares:
    """How the time of a pipeline's stages comes about.

    Attributes:
        of_time, of_bytes: by layer, its share of what its virtual stage takes and holds.
        seconds: by layer, what it takes on a stage that is not slow.
        slowness: by stage, how many times as long the same work takes there.
    """

    of_time: Sequence[float]
    of_bytes: Sequence[float]
    seconds: Sequence[float]
    slowness: Sequence[float]


def busy_seconds(steps: Sequence[StepTrace]) -> dict[int, float]:
    """What each virtual stage computed in all of these steps (s)."""
    busy: dict[int, float] = defaultdict(float)
    for trace in steps:
        for record in trace.records:
            busy[trace.placement.virtual_stage(record.stage, record.task.chunk)] += record.end - record.start
    return busy


def layer_shares(work: Work, busy: Mapping[int, float], placement: Placement) -> LayerShares:
    """Which layer takes how long."""
    ranges = work.ranges()
    stage_of = [placement.place(v)[0] for v in range(len(ranges))]
    parts = [_Part.of([work.layers[i] for i in layers], work.measure) for layers in ranges]
    rates = [busy[v] / part.measured for v, part in enumerate(parts) if part.measured and not part.others]
    usual = median_low(rates) if len(rates) > 1 else None
    found: dict[int, list[float]] = defaultdict(list)
    for v, part in enumerate(parts):
        found[stage_of[v]].append(1.0 if usual is None else part.slowness(busy[v], usual))
    slowness = [fmean(found[stage]) for stage in range(placement.stages)]
    of_time, of_bytes, seconds = [], [], []
    for v, (layers, part) in enumerate(zip(ranges, parts, strict=True)):
        own = [work.layers[i] for i in layers]
        slow = slowness[stage_of[v]]
        scale = 1.0 if usual is None else part.scale_of_others(busy[v] / slow, usual)
        shares = shares_of([one.estimate * (1.0 if one.name == work.measure else scale) for one in own])
        of_time += shares
        of_bytes += shares_of([layer.held_bytes for layer in own])
        seconds += [share * busy[v] / slow for share in shares]
    return LayerShares(of_time, of_bytes, seconds, slowness)


class _Part(NamedTuple):
    """What shapes say of a virtual stage: of its layers that are the measure, and of its others (s)."""

    measured: float
    others: float

    @classmethod
    def of(cls, layers: Sequence[LayerWork], measure: str) -> _Part:
        own = [layer.estimate for layer in layers if layer.name == measure]
        return cls(sum(own), sum(layer.estimate for layer in layers) - sum(own))

    def slowness(self, busy: float, usual: float) -> float:
        """How many times as long it takes as it should, if other layers take what they can.

        Args:
            busy: what it took (s).
            usual: seconds that the measure takes for one that shapes say.
        """
        if not self.others:
            return busy / (usual * self.measured) if self.measured else 1.0
        most = usual * (self.measured + FURTHEST * self.others)
        return max(busy / most, 1.0)

    def scale_of_others(self, busy: float, usual: float) -> float:
        """How much longer other layers take, beside the measure, than shapes say."""
        rest = busy - usual * self.measured
        return max(rest / (usual * self.others), 0.0) if self.others and self.measured else 1.0


def shares_of(weights: Sequence[float]) -> list[float]:
    """As shares that add up to 1; equal ones if all are zero."""
    whole = sum(weights)
    return [weight / whole if whole else 1 / len(weights) for weight in weights]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that ran, and what it was decided by.

    Attributes:
        trace: what happened.
        rules: of the step.
        budgets: in bytes, by stage; None for none.
        buckets: the names of the microbatches' buckets.
        grouped: whether several processes shared a stage.
        lead: how long before a task's end the next one was queued (s).
        work: what the model's layers have to do, found out when somebody asks; None if that is not known.
    """

    trace: StepTrace
    rules: StepRules
    budgets: Sequence[Budget | None] | None = None
    buckets: Sequence[str]
    grouped: bool = False
    lead: float = 0.0
    work: Callable[[], Work | None] = field(default=lambda: None, compare=False, repr=False)

    @property
    def fixed_order(self) -> bool:
        """Whether its schedule was one, or a hint."""
        return isinstance(self.rules.schedule, FixedOrder)
