"""All schedules by name: hints, which rank what is runnable, and fixed orders, which are followed.

Orders from files have the CSV form of PyTorch's pipelining: a row per stage, a cell per time slot, "5F3" or
nothing. A cell names virtual stage, kind (F, I, W, or B for the fused backward) and microbatch. Empty cells
are idle slots and mean nothing here. The placement of the rows, looped or v, is inferred from them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from rrfp_jax.core.hints import BF, BFW, FB, BPriority, FPriority, Hint, Ranked
from rrfp_jax.core.orders import ZBH1, ZBH2, FixedOrder, GPipe, Interleaved1F1B, ListedOrder, OneFOneB
from rrfp_jax.core.tasks import KINDS, SHAPES, Kind, Placement, Task
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
"""By the names that users give; each is also a candidate of the planner (sim/planned.py)."""

RANKED = "ranked:"
"""Before the name of a fixed order: readiness first by that order, which reserves its memory."""


def by_name(name: str) -> Schedule:
    """A schedule by its name on command lines and in configs; ValueError if there is none."""
    order = name.removeprefix(RANKED) if isinstance(name, str) else ""
    if order not in NAMED:
        known = ", ".join(sorted(NAMED))
        near = get_close_matches(order.lower(), NAMED, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"schedule={name!r}: no such schedule or hint{meant}; choose one of {known}, {RANKED}ORDER"
        )
    found = NAMED[order]
    if order == name:
        return found
    if not isinstance(found, FixedOrder):
        raise ValueError(f"schedule={name!r}: {order} ranks what is ready already: choose {order}")
    return Ranked(found)


def name_of(schedule: Schedule) -> str:
    """Its name on command lines, or how it is made if it has none."""
    if isinstance(schedule, Ranked) and schedule.reserve:
        return RANKED + name_of(schedule.order)
    return next((name for name, known in NAMED.items() if known == schedule), repr(schedule))


NUMBER = "(0|[1-9][0-9]{0,17})"
LETTERS = [row.letter for row in KINDS]
CELL = re.compile(f"{NUMBER}([{''.join(LETTERS)}]){NUMBER}")


def read_csv(text: str) -> ListedOrder:
    """The order that a CSV file describes.

    Raises:
        ValueError: naming line and cell: one that is no task, or a virtual stage on a row where neither
            placement has it; a virtual stage or microbatch that is left out; no tasks at all. What each stage
            must hold is checked by its scheduler.
    """
    found = [[(at, *_parsed(at, cell)) for at, cell in row] for row in _cells(text) if row]
    if not found:
        raise ValueError("the CSV holds no tasks: give a row of cells such as 0F0 per stage")
    stages = len(found)
    last = _last("virtual stage", {v for row in found for _, v, _, _ in row})
    microbatches = 1 + _last("microbatch", {j for row in found for *_, j in row})
    chunks = last // stages + 1
    wrong = [_misplaced(found, Placement(stages, chunks, shape)) for shape in SHAPES]
    if None not in wrong:
        raise ValueError(
            f"{wrong[0]}: with {stages} rows, neither the looped nor the v placement has it there"
        )
    placement = Placement(stages, chunks, SHAPES[wrong.index(None)])
    rows = tuple(tuple(Task(kind, v // stages, j) for _, v, kind, j in row) for row in found)
    return ListedOrder(placement, microbatches, rows)


def _cells(text: str) -> list[list[tuple[str, str]]]:
    """The cells of each row that are not empty, with their places."""
    reader, rows = csv.reader(io.StringIO(text)), []
    try:
        for row in reader:
            named = [(f"line {reader.line_num}, cell {at}", cell.strip()) for at, cell in enumerate(row, 1)]
            rows.append([(at, cell) for at, cell in named if cell])
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is no CSV: {error}") from None
    return rows


def _last(what: str, present: Collection[int]) -> int:
    """The highest number of a virtual stage or microbatch, if all below it are there, too."""
    if len(present) <= (last := max(present)):
        missing = next(number for number in range(last) if number not in present)
        raise ValueError(f"{what} {missing} has no tasks, although {last} has some")
    return last


def _parsed(at: str, cell: str) -> tuple[int, Kind, int]:
    if (match := CELL.fullmatch(cell)) is None:
        kinds = f"{', '.join(LETTERS[:-1])} or {LETTERS[-1]}"
        raise ValueError(f"{at}: {cell!r} is no task: write virtual stage, {kinds}, microbatch")
    v, letter, microbatch = match.groups()
    return int(v), Kind(LETTERS.index(letter)), int(microbatch)


def _misplaced(rows: Sequence[Sequence[tuple[str, int, Kind, int]]], placement: Placement) -> str | None:
    """A cell that is on another row than its virtual stage's; None if there is none."""
    for number, row in enumerate(rows):
        for at, v, kind, microbatch in row:
            if placement.place(v)[0] != number:
                return f"{at}: {v}{kind.letter}{microbatch}"
    return None
