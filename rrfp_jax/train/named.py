"""Schedules as users give them: an object, a name, or a file with an order."""

from __future__ import annotations

from pathlib import Path

from rrfp_jax.core.csvorder import read_csv
from rrfp_jax.core.deadlock import check_can_end
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.errors import UsageError

CSV = "csv:"


def schedule_of(given: Schedule | str) -> Schedule:
    """The schedule that is meant; `csv:FILE` is an order in PyTorch's CSV form (`core/csvorder.py`).

    Raises:
        UsageError: no such name or file, or an order that lacks or repeats a task, has one before another
            that it needs, or must deadlock.
    """
    if isinstance(given, str) and given.startswith(CSV):
        return _order_in(given)
    try:
        schedule = by_name(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(f"{error}, or {CSV}FILE") from None
    if not isinstance(schedule, (Hint, FixedOrder)):
        raise UsageError(f"schedule={given!r}: give a name or an object of rrfp.schedules, such as BF()")
    return schedule


def _order_in(given: str) -> FixedOrder:
    try:
        order = read_csv(Path(given.removeprefix(CSV)).read_text(encoding="utf-8"))
        rules = StepRules(placement=order.placement, microbatches=order.microbatches, schedule=order)
        check_can_end(rules)
    except OSError as error:
        raise UsageError(f"{given}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{given}: {error}") from None
    return order
