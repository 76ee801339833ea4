"""Where the paper's gain comes from: messages, order or memory; the three parts add up to the whole.

1F1B, synchronous messages      the paper's baseline
1F1B, asynchronous messages     the difference is that of the *messages*
BF or BFW at 1F1B's bytes       the difference is that of the *order*
BF or BFW, 32 in flight         the difference is that of the *memory*
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.harness import table
from benchmarks.studies.paper.published import ROWS, Row
from benchmarks.studies.paper.steps import How, most_bytes, paper, run
from benchmarks.studies.paper.workloads import Machine, workload

HINTS = ("BF", "BFW")
PARTS = ("messages", "order", "memory")
SPLIT = (
    *("GPT3-Large 1/8/1", "GPT3-Large 1/16/1", "Qwen3-1.7B + ViT-H 1/8/1", "Qwen3-1.7B + ViT-H 1/16/1"),
    *("Qwen3-4B + ViT-Big 1/8/1", "Qwen3-4B + ViT-Big 2/16/1", "LLaMA3-8B + ViT-5B 2/16/1"),
    "Qwen3-32B + InternViT 2/32/1",
)
"""Rows that are taken apart, one replica each."""


@dataclass(frozen=True)
class Split:
    """One row under one hint, in seconds.

    Attributes:
        synchronous, asynchronous: 1F1B.
        equal: the hint at 1F1B's bytes.
        free: the hint as the paper has it.
        held: its most bytes on a stage, over those of 1F1B.
    """

    row: str
    hint: str
    synchronous: float
    asynchronous: float
    equal: float
    free: float
    held: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """What messages, order and memory gain, in shares of synchronous 1F1B's time."""
        times = (self.synchronous, self.asynchronous, self.equal, self.free)
        messages, order, memory = ((before - after) / self.synchronous for before, after in pairwise(times))
        return messages, order, memory


def rows() -> list[Row]:
    """The rows that are taken apart."""
    return [row for row in ROWS if row.name in SPLIT]


def split(machine: Machine, row: Row) -> list[Split]:
    """One step of a row, under both hints."""
    work, how = workload(row, machine, 0), paper(row, machine)
    synchronous = run(work, how["1F1B"]).makespan
    plain = run(work, How("1f1b", "serial"))
    unit = most_bytes(plain, work)
    found = []
    for hint in HINTS:
        free = run(work, how[hint])
        equal = run(work, how[hint]._replace(bytes=math.ceil(unit)))
        held = most_bytes(free, work) / unit
        times = (synchronous, plain.makespan, equal.makespan, free.makespan)
        found.append(Split(row.name, hint, *times, held))
    return found


def markdown(splits: Sequence[Split]) -> str:
    """Shares of synchronous 1F1B's time."""
    cells = []
    for one in splits:
        parts = [f"{part:.0%}" for part in (*one.parts, sum(one.parts))]
        cells.append((one.row, one.hint, f"{one.synchronous:.2f}", *parts, f"{one.held:.1f} x"))
    return table(["row, TP/PP/DP", "hint", "1F1B, s", *PARTS, "together", "bytes held"], cells)
