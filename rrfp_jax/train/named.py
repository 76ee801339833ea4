"""Schedules and costs as users give them: an object, a name, or a file; or a way to find one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp_jax.core.hints import Hint, Ranked
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import check_can_end
from rrfp_jax.core.schedules import RANKED, Schedule, by_name, read_csv
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of, printable
from rrfp_jax.files import read_whole
from rrfp_jax.json_files import load_json
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import CostTable


def read_costs(path: str | Path, where: str) -> CostTable:
    """The cost table of a JSON file; messages begin with `where`."""
    file = path_of("file", path)
    try:
        return CostTable.from_json_object(load_json(file))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{where}: no cost table: {printable(str(error))}") from None


CSV = "csv:"

LARGEST_ORDER = 2**24
"""Bytes of a file with an order; a task takes about six."""

PLANNED, AUTO = "planned", "auto"
"""An order that is planned for each step, PLANNED:FILE by costs of a file; a hint that is chosen."""


def read_schedule(given: Schedule | Planned | Auto | str) -> Schedule | Planned | Auto:
    """The schedule that is meant, or how it is found: planned, with the costs to go by, or chosen."""
    if isinstance(given, str):
        if given == AUTO:
            return Auto()
        name, _, file = given.partition(":")
        if name != PLANNED:
            return schedule_of(given, (AUTO, PLANNED, f"{PLANNED}:FILE"))
        if given.endswith(":"):
            raise UsageError(
                f"schedule={given!r}: no file of costs is named; leave out the colon for measured ones"
            )
        given = Planned(costs=file or None)
    if isinstance(given, Planned) and isinstance(given.costs, str):
        return replace(given, costs=read_costs(given.costs, f"costs={given.costs}"))
    return given if isinstance(given, (Planned, Auto)) else schedule_of(given)


def schedule_of(given: Schedule | str, others: Sequence[str] = ()) -> Schedule:
    """The schedule that is meant; `csv:FILE` is an order in PyTorch's CSV form (`core/schedules.py`)."""
    if isinstance(given, str) and given.removeprefix(RANKED).startswith(CSV):
        source = given.removeprefix(RANKED)
        file = path_of("schedule", source.removeprefix(CSV))
        try:
            order = read_csv(read_whole(file, LARGEST_ORDER).decode())
            placement, microbatches = order.placement, order.microbatches
            check_can_end(StepRules(placement=placement, microbatches=microbatches, schedule=order))
        except OSError as error:
            raise UsageError(f"{source}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{source}: {printable(str(error))}") from None
        return Ranked(order) if given.startswith(RANKED) else order
    try:
        schedule = by_name(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(", or ".join([str(error), *others, f"{CSV}FILE"])) from None
    if not isinstance(schedule, (Hint, FixedOrder)):
        wanted = ", or ".join(["give a name or an object of rrfp.schedules, such as BF()", *others])
        raise UsageError(f"schedule={given!r}: {wanted}")
    return schedule
