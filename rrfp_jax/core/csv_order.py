"""Orders in the CSV form of PyTorch's pipelining: a row per stage, a cell per time slot, "5F3" or nothing.

A cell names virtual stage, kind (F, I, W, or B for the fused backward) and microbatch. Empty cells are idle
slots and mean nothing here. The placement of the rows, looped or v, is inferred from them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from rrfp_jax.core.orders import FixedOrder, ListedOrder
from rrfp_jax.core.tasks import Kind, Placement, Shape, Task

CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def read_csv(text: str) -> ListedOrder:
    """The order that a CSV file describes.

    Raises:
        ValueError: naming line and cell: one that is no task, a virtual stage on a row where neither
            placement has it, or that is left out; no tasks at all. What each stage must hold is checked by
            its scheduler.
    """
    reader = csv.reader(io.StringIO(text))
    cells = [
        [
            (f"line {reader.line_num}, cell {at}", cell.strip())
            for at, cell in enumerate(row, 1)
            if cell.strip()
        ]
        for row in reader
    ]
    found = [[(at, *_parsed(at, cell)) for at, cell in row] for row in cells if row]
    if not found:
        raise ValueError("the CSV holds no tasks: give a row of cells such as 0F0 per stage")
    stages = len(found)
    present = {v for row in found for _, v, _, _ in row}
    last = max(present)
    if len(present) <= last:
        missing = next(v for v in range(last) if v not in present)
        raise ValueError(f"virtual stage {missing} has no tasks, although {last} has some")
    chunks = last // stages + 1
    shapes: tuple[Shape, ...] = ("looped", "v")
    wrong = [_misplaced(found, Placement(stages, chunks, shape)) for shape in shapes]
    if None not in wrong:
        raise ValueError(
            f"{wrong[0]}: with {stages} rows, neither the looped nor the v placement has it there"
        )
    placement = Placement(stages, chunks, shapes[wrong.index(None)])
    rows = tuple(tuple(Task(kind, v // stages, j) for _, v, kind, j in row) for row in found)
    return ListedOrder(placement, 1 + max(j for row in found for *_, j in row), rows)


def write_csv(schedule: FixedOrder, placement: Placement, microbatches: int) -> str:
    """A fixed order as CSV, without idle slots."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for stage in range(placement.stages):
        tasks = schedule.order(stage, placement, microbatches)
        writer.writerow(
            f"{placement.virtual_stage(stage, chunk)}{kind.letter}{microbatch}"
            for kind, chunk, microbatch in tasks
        )
    return out.getvalue()


def _parsed(at: str, cell: str) -> tuple[int, Kind, int]:
    match = CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{at}: {cell!r} is no task: write virtual stage, F, B, I or W, microbatch")
    v, letter, microbatch = match.groups()
    return int(v), next(kind for kind in Kind if kind.letter == letter), int(microbatch)


def _misplaced(rows: Sequence[Sequence[tuple[str, int, Kind, int]]], placement: Placement) -> str | None:
    """A cell that is on another row than its virtual stage's; None if there is none."""
    for number, row in enumerate(rows):
        for at, v, kind, microbatch in row:
            if placement.place(v)[0] != number:
                return f"{at}: {v}{kind.letter}{microbatch}"
    return None
