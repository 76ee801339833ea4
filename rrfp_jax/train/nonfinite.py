"""Steps whose loss or gradient is not finite: the messages, and when a run stops because of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rrfp_jax.errors import TrainingError
from rrfp_jax.json_files import Count
from rrfp_jax.runtime.engine.settings import LossScale, OnNonfinite
from rrfp_jax.runtime.stages.step import Sums

MOST_IN_VAIN = 20
"""So many steps may be left out in a row without a loss scale that could still be lowered."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How training stands after some steps, equal on all processes.

    Attributes:
        loss_scale: of the next step.
        skipped: steps that were left out so far.
        in_vain: of them, those in a row up to now for which the loss scale could not be lowered.
    """

    loss_scale: LossScale
    skipped: Count = 0
    in_vain: Count = 0

    def after(self, finite: bool) -> Standing:
        """After one more step."""
        scale = self.loss_scale
        if scale.dynamic:
            scale = scale.after(finite)
        if finite:
            return replace(self, loss_scale=scale, in_vain=0)
        in_vain = self.in_vain + 1 if scale.value == self.loss_scale.value else 0
        return Standing(loss_scale=scale, skipped=self.skipped + 1, in_vain=in_vain)


def is_finite(sums: Sums) -> bool:
    """Whether a step can be applied."""
    return sums.norms.finite and all(map(math.isfinite, [*sums.totals, sums.weight]))


def leave_out(
    standing: Standing, policy: OnNonfinite, step: int, sums: Sums, where: Callable[[], str]
) -> Standing:
    """How training stands after a step that cannot be applied.

    Args:
        standing: before it.
        policy: "stop" or "skip"; a step is skipped in any case if the loss scale is lowered for it.
        step: its number.
        sums: of the step.
        where: finds the gradient that is not finite; called by all processes, or none.

    Raises:
        TrainingError: the run stops, by the policy or because too many steps were left out in a row.
    """
    after = standing.after(finite=False)
    if after.in_vain == 0 or (policy == "skip" and after.in_vain < MOST_IN_VAIN):
        return after
    many = "" if policy == "stop" else f" It is the {after.in_vain}th step in a row that is left out."
    raise TrainingError(f"step {step}: {_what(sums, where)}{many}")


def _what(sums: Sums, where: Callable[[], str]) -> str:
    for j, total in enumerate(sums.totals):
        if not math.isfinite(total):
            return (
                f"the loss of microbatch {j} is {total}; the step is not applied. Look at that microbatch's "
                f"data, lower the learning rate, or set clip_norm=1.0"
            )
    if not math.isfinite(sums.weight):
        return f"the summed loss weight is {sums.weight}; the step is not applied. Look at the step's data"
    return (
        f"the gradient of {where()} is not finite although every loss is; the step is not applied. Look for "
        f"a division by zero or a root at zero in the model's backward, lower the learning rate, or for "
        f"float16 set loss_scale='dynamic'"
    )
