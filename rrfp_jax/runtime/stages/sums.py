"""What the microbatches of a step add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.metrics import Reduced, add_to
from rrfp_jax.runtime.stages.stage import Stage


@dataclass(frozen=True)
class Sums:
    """Of a step's microbatches, in microbatch order, in float64; zeros where there are no gradients."""

    totals: Sequence[float]  # per microbatch
    weight: float
    metrics: Mapping[str, Reduced]
    hyperparams: Mapping[str, float]  # of the update that would follow, as far as they are injected
    finite: bool  # whether all gradient sums are
    squared_norm: float  # of the gradient sums over all stages; tied ones once, frozen ones not
    squared_parameter_norm: float  # of the same parameters
    recorded: RecordedStep
    peak_bytes: Sequence[int]  # by stage, the most that was there for microbatches, of any replica
    budget_bytes: Sequence[int | None]  # by stage, for that
    load_seconds: float  # of the process that waited longest for the step's data

    @property
    def total(self) -> float:
        """The step's summed loss."""
        return float(np.sum(np.asarray(self.totals, np.float64)))


def add_up(
    results: Sequence[Mapping[str, Any]],
    microbatches: int,
    recorded: RecordedStep,
    budgets: Sequence[int | None],
) -> Sums:
    """Sum what all virtual stages found of every microbatch, in the model's order, and that in theirs.

    Args:
        results: of each process: `virtual_stages`, tuples of virtual stage, microbatch, metrics and numbers
            of statistics; `norms`, tuples of stage and what `SumPrograms.norms` gives; `hyperparams`, by
            name; `peaks`, of stage replica and bytes; `load_seconds`.
        microbatches: their number.
        recorded: the step.
        budgets: bytes for microbatches, by stage replica.
    """
    stages = recorded.trace.stages
    peaks = dict(tuple(own) for result in results for own in result["peaks"])
    totals = [0.0] * microbatches
    weight, metrics = 0.0, dict[str, Reduced]()
    found = sorted(tuple(own) for result in results for own in result["virtual_stages"])
    for _, j, names, (total, counted, *numbers) in found:
        totals[j] += total
        weight += counted
        add_to(metrics, names, numbers)
    norms = [own for _, own in sorted(tuple(own) for result in results for own in result["norms"])]
    return Sums(
        totals,
        weight,
        metrics,
        next((result["hyperparams"] for result in results if result["hyperparams"]), {}),
        finite=all(math.isfinite(largest) for largest, _, _ in norms),
        squared_norm=sum(largest**2 * share for largest, share, _ in norms),
        squared_parameter_norm=sum(squares for _, _, squares in norms),
        recorded=recorded,
        peak_bytes=[max(peaks[number] for number in range(s, len(peaks), stages)) for s in range(stages)],
        budget_bytes=[_least(budgets[s::stages]) for s in range(stages)],
        load_seconds=max(result["load_seconds"] for result in results),
    )


def not_finite(stages: Mapping[int, Stage], layout: Layout) -> str:
    """Where gradient sums are not finite: the one nearest to the loss, of all processes together."""
    mine = [(number, path) for number, stage in stages.items() for path in stage.not_finite()]
    gathered = layout.world.gather("where gradients are not finite", mine)
    found = [own for part in gathered for own in part]
    if not found:  # finite in float64, too large for the norm's float32
        return "some parameter"
    number, path = max(found, key=lambda own: int(own[1].split(".")[0]))
    return f"{path} on {layout.name(number)}"


def _least(budgets: Sequence[int | None]) -> int | None:
    """Of a stage's replicas, all of which have a budget or none."""
    known = [budget for budget in budgets if budget is not None]
    return min(known, default=None)
