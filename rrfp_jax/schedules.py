"""The schedules a Trainer takes: hints (`BF` and others), fixed orders (`OneFOneB` and others), `Planned`,
and `Auto`.

The classes are in core/hints.py and core/orders.py, their names in core/schedules.py. Write your own by
subclassing `Hint` (ranks what is ready) or `FixedOrder` (a planned order).
"""

from rrfp_jax.core.hints import BF, BFW, FB, BPriority, FPriority, Hint, HintView, Ranked
from rrfp_jax.core.orders import ZBH1, ZBH2, FixedOrder, GPipe, Interleaved1F1B, OneFOneB
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Direction, Placement, Task
from rrfp_jax.core.v_orders import VZB, ZBV, DualPipeV, VHalf, VMin
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned

__all__ = [
    "BACKWARD",
    "BF",
    "BFW",
    "FB",
    "FORWARD",
    "INPUT",
    "VZB",
    "WEIGHT",
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Auto",
    "BPriority",
    "Direction",
    "DualPipeV",
    "FPriority",
    "FixedOrder",
    "GPipe",
    "Hint",
    "HintView",
    "Interleaved1F1B",
    "OneFOneB",
    "Placement",
    "Planned",
    "Ranked",
    "Schedule",
    "Task",
    "VHalf",
    "VMin",
    "by_name",
]
