"""The table of parts: what each is called, where it is, and what it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check, run in a process of its own.

    Attributes:
        number: by which it is asked for.
        title: in the table.
        module: has `measure(found: Findings) -> None`.
        seconds: limit, compiling and the start of the process included.
        memory: share of the GPU's memory that its process takes; some start others beside themselves.
    """

    number: int
    title: str
    module: str
    seconds: float
    memory: float


PARTS: Sequence[Part] = (
    Part(number=7, title="compiled ahead", module="benchmarks.gpu.ahead", seconds=60, memory=0.3),
    Part(number=1, title="open questions", module="benchmarks.gpu.questions", seconds=80, memory=0.3),
    Part(number=2, title="parity", module="benchmarks.gpu.parity", seconds=75, memory=0.4),
    Part(number=3, title="the tax", module="benchmarks.gpu.throughput", seconds=105, memory=0.9),
    Part(number=4, title="host and room", module="benchmarks.gpu.room", seconds=60, memory=0.9),
    Part(number=5, title="a 7B block", module="benchmarks.gpu.block", seconds=70, memory=0.9),
    Part(number=6, title="layer costs", module="benchmarks.gpu.costs", seconds=85, memory=0.9),
)
"""In the order in which they are run; their limits add up to less than 9 minutes."""
