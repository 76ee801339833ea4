"""The factor on the loss that keeps small gradients from vanishing, constant or dynamic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, shown
from rrfp_jax.json_files import Count

TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """What the loss is multiplied by before it is differentiated; gradients are divided by it again.

    It keeps small gradients from vanishing in float16 (arXiv:1710.03740, section 3.2). Losses here are sums,
    so the gradient of one token's loss is not divided by the number of tokens before it is scaled; scales
    that fit are smaller than for means by about that number, and may be below 1.

    A dynamic one is halved by a step whose loss or gradient is not finite, which is then left out, and
    doubled after many good steps.

    Attributes:
        value: a power of two changes no bit of a gradient that neither overflows nor vanishes.
        dynamic: whether it changes.
        good_steps: in a row since the last change.
        growth_interval: how many of them double it.
        smallest, largest: bounds of a dynamic one.

    Raises:
        UsageError: a value that is no positive normal float32; bounds that do not hold it.
    """

    value: float = 2.0**15
    dynamic: bool = True
    good_steps: Count = 0
    growth_interval: Count = 2000
    smallest: float = 2.0**-24
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        check_fields(self)
        held = f"from {TINY:.2g} to {LARGEST:.2g}, as float32 holds them"
        if not TINY <= self.value <= LARGEST:
            raise UsageError(f"loss_scale={self.value}: give a number {held}, or 'dynamic'")
        if self.dynamic and not (TINY <= self.smallest <= self.value <= self.largest <= LARGEST):
            bounds = f"smallest={self.smallest} to largest={self.largest}, and those {held}"
            raise UsageError(f"loss_scale={self.value}: must be from {bounds}")
        if self.growth_interval < 1:
            raise UsageError(f"growth_interval={self.growth_interval}: give at least one step")

    def after(self, finite: bool) -> LossScale:
        """The dynamic scale of the next step, after one whose loss and gradient were all finite or not."""
        if not finite:
            return replace(self, value=max(self.value / 2, self.smallest), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=min(self.value * 2, self.largest), good_steps=0)

    def resumed(self, stored: LossScale) -> LossScale:
        """This one after a checkpoint with another: the value that it had come to, if both are dynamic."""
        if not (self.dynamic and stored.dynamic):
            return self
        value = min(max(stored.value, self.smallest), self.largest)
        return replace(self, value=value, good_steps=stored.good_steps)

    def __str__(self) -> str:
        return "dynamic" if self.dynamic else f"{self.value:g}"


def loss_scale_of(given: Any) -> LossScale:
    """A setting as a `LossScale`: None for none, a number for a constant one, "dynamic", or a LossScale."""
    if isinstance(given, LossScale):
        return given
    if isinstance(given, str) and given == "dynamic":
        return LossScale()
    try:
        if isinstance(given, (bool, np.bool_)):
            raise TypeError
        value = 1.0 if given is None else float(given)
    except (TypeError, ValueError):
        raise UsageError(f"loss_scale={shown(given)}: give None, a number above 0, or 'dynamic'") from None
    checked = LossScale(value=value, dynamic=False)
    return replace(checked, value=float(np.float32(value)))  # as stages have it
