"""The schedules a Trainer takes: fixed orders (`GPipe`, `OneFOneB`) and hints (`BF`).

Write your own by subclassing `Hint` (ranks what is ready) or `FixedOrder` (a planned order).
"""

from rrfp_jax.core.schedules import BF, FixedOrder, GPipe, Hint, OneFOneB, Schedule, by_name

__all__ = ["BF", "FixedOrder", "GPipe", "Hint", "OneFOneB", "Schedule", "by_name"]
