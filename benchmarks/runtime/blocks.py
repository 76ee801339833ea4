"""Paced runs of a pipeline of equal blocks, with one thing or another different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from benchmarks.runtime.paced import run_paced
from rrfp_jax.report.explanation import TimedStep
from rrfp_jax.trace.costs import Table, Workload, log_normal
from rrfp_jax.trace.layers import LayerWork, Work

STAGES, MICROBATCHES = 4, 16
EVEN = (5, 5, 5, 5)
BLOCK_SECONDS = 4e-3
TASKS = ("forward", "backward_input", "backward_weight")
STEPS, WARM_UP = 14, 4


@dataclass(frozen=True, kw_only=True)
class Paced:
    """A run on paced devices.

    Attributes:
        split: blocks of each stage.
        slowness: of each stage: how many times as long its tasks take.
        lengths: of each microbatch, as its blocks' times go with it.
        hop: seconds that a message takes.
        link, link_seconds: messages after this stage, there and back, take so long; None for a hop.
        schedule: by name.
        limit: most microbatches in flight.
        jitter: sd of the logarithm of what tasks take; below 0, each takes the median of that of its stage.
        seed: of it.
    """

    split: tuple[int, ...] = EVEN
    slowness: tuple[float, ...] = (1.0,) * STAGES
    lengths: tuple[float, ...] = (1.0,) * MICROBATCHES
    hop: float = 1e-3
    link: int = 0
    link_seconds: float | None = None
    schedule: str = "bf"
    limit: int = 2 * STAGES
    jitter: float = 0.03
    seed: int

    @property
    def workload(self) -> Workload:
        """Seconds of all tasks and transfers."""
        drawn = log_normal(
            *(STAGES, MICROBATCHES),
            forward=BLOCK_SECONDS,
            sigma=abs(self.jitter),
            shared=0.0,
            seed=self.seed,
            transfer=self.hop,
        )
        if self.jitter < 0:
            drawn = replace(drawn, **{name: _steady(getattr(drawn, name)) for name in TASKS})
        factors = [
            [blocks * slow * length for length in self.lengths]
            for blocks, slow in zip(self.split, self.slowness, strict=True)
        ]
        own = drawn.scaled(factors, factors)
        forward, backward = list(own.transfer_forward), list(own.transfer_backward)
        if self.link_seconds is not None:
            forward[self.link] = backward[self.link + 1] = (self.link_seconds,) * MICROBATCHES
        return replace(own, transfer_forward=tuple(forward), transfer_backward=tuple(backward))

    @cache  # noqa: B019  # frozen, and there are few
    def run(self) -> Sequence[TimedStep]:
        """Its steps after the first ones."""
        work = Work([LayerWork("Block", BLOCK_SECONDS, 1)] * sum(self.split), self.split)
        steps = run_paced(self.workload, self.schedule, self.limit, STEPS)[WARM_UP:]
        return [replace(step, recorded=replace(step.recorded, work=lambda: work)) for step in steps]


def _steady(rows: Table) -> Table:
    return tuple((median(row),) * len(row) for row in rows)
