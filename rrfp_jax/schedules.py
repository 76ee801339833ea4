"""The schedules a Trainer takes: fixed orders (`GPipe`, `OneFOneB`) and hints (`BF`).

Write your own by subclassing `Hint` (ranks what is ready) or `FixedOrder` (a planned order).
"""

from rrfp_jax.core.schedules import BF, FixedOrder, GPipe, Hint, OneFOneB, Runnable, Schedule, by_name
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task

__all__ = [
    "BACKWARD",
    "BF",
    "FORWARD",
    "FixedOrder",
    "GPipe",
    "Hint",
    "OneFOneB",
    "Placement",
    "Runnable",
    "Schedule",
    "Task",
    "by_name",
]
