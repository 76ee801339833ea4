"""All schedules by name: hints, which rank what is runnable, and fixed orders, which are followed."""

from __future__ import annotations

from typing import TypeAlias

from rrfp_jax.core.hints import BF, BFW, FB, BPriority, FPriority, Hint
from rrfp_jax.core.orders import ZBH1, ZBH2, FixedOrder, GPipe, Interleaved1F1B, OneFOneB
from rrfp_jax.core.ranked import Ranked
from rrfp_jax.core.v_orders import VZB, ZBV, DualPipeV, VHalf, VMin

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
    "v-zb": VZB(),
    "dualpipe-v": DualPipeV(),
}


RANKED = "ranked:"
"""Before the name of a fixed order: readiness first by that order, which reserves its memory."""


def by_name(name: str) -> Schedule:
    """A schedule by its name on command lines and in configs.

    Raises:
        ValueError: no such schedule, or a ranking by one that is no fixed order.
    """
    order = name.removeprefix(RANKED) if isinstance(name, str) else ""
    if order not in NAMED:
        known = ", ".join(sorted(NAMED))
        raise ValueError(f"schedule={name!r}: no such schedule or hint; choose one of {known}, {RANKED}ORDER")
    found = NAMED[order]
    return found if order == name else ranked(found, name)


def ranked(order: Schedule, name: str) -> Ranked:
    """Readiness first by an order.

    Raises:
        ValueError: what was named is no fixed order.
    """
    if not isinstance(order, FixedOrder):
        raise ValueError(f"schedule={name!r}: {name.removeprefix(RANKED)} ranks what is ready already")
    return Ranked(order)


def name_of(schedule: Schedule) -> str:
    """Its name on command lines, or how it is made if it has none."""
    if isinstance(schedule, Ranked) and schedule.reserve:
        return RANKED + name_of(schedule.order)
    return next((name for name, known in NAMED.items() if known == schedule), repr(schedule))
