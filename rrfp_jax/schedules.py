"""The schedules a Trainer takes, most of them by name: hints, fixed orders, `Planned`, and `Auto`.

The classes are in core/hints.py, core/orders.py and core/v_orders.py, their names in core/schedules.py. Write
your own by subclassing `Hint` (ranks what is ready) or `FixedOrder` (a listed order).
"""

from rrfp_jax.core.hints import BF, BFW, Hint, HintView, Ranked
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Direction, Placement, Task
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned

__all__ = [
    "BACKWARD",
    "BF",
    "BFW",
    "FORWARD",
    "INPUT",
    "WEIGHT",
    "Auto",
    "Direction",
    "FixedOrder",
    "Hint",
    "HintView",
    "Placement",
    "Planned",
    "Ranked",
    "Schedule",
    "Task",
    "by_name",
]
