"""All schedules by name: hints, which rank what is ready, and fixed orders, which are followed."""

from __future__ import annotations

from typing import TypeAlias

from rrfp_jax.core.hints import BF, BFW, FB, BPriority, FPriority, Hint
from rrfp_jax.core.orders import ZBH1, ZBH2, FixedOrder, GPipe, Interleaved1F1B, OneFOneB
from rrfp_jax.core.v_blocks import VHalf, VMin
from rrfp_jax.core.v_orders import ZBV, DualPipeV

Schedule: TypeAlias = Hint | FixedOrder

NAMED: dict[str, Schedule] = {
    "bf": BF(),
    "bfw": BFW(),
    "fb": FB(),
    "b-priority": BPriority(),
    "f-priority": FPriority(),
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "interleaved-1f1b": Interleaved1F1B(),
    "zb-h1": ZBH1(),
    "zb-h2": ZBH2(),
    "zb-v": ZBV(),
    "v-half": VHalf(),
    "v-min": VMin(),
    "dualpipe-v": DualPipeV(),
}


def by_name(name: str) -> Schedule:
    """A schedule by its name on command lines and in configs.

    Raises:
        ValueError: no such schedule.
    """
    if name not in NAMED:
        known = ", ".join(sorted(NAMED))
        raise ValueError(f"schedule={name!r}: no such schedule or hint; choose one of {known}")
    return NAMED[name]
