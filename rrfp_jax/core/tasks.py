"""Tasks and where they run: kinds, names, and the rules that say which task feeds which.

A model is cut into `stages * chunks` consecutive pieces, the *virtual stages*. Virtual stage
`chunk * stages + stage` runs on `stage` (looped placement). One microbatch passes through as

    F(v=0) -> F(1) -> ... -> F(last)        activations, from v to v + 1
                               |             same stage: the forward's output feeds its own backward
    B(v=0) <- B(1) <- ... <- B(last)        gradients, from v to v - 1

B is the fused backward: input and parameter gradients in one task. Tasks are written as in PyTorch's
schedule files: kind and microbatch ("F3"), with the chunk where there are several ("F3.1").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a task computes. An integer, because tasks are hashed and compared in the dispatch loop."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def letter(self) -> str:
        """The one-letter name used in schedules and traces."""
        return "FB"[self]


FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


class Task(NamedTuple):
    """One unit of work of a stage: a direction of one model chunk for one microbatch."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        suffix = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.letter}{self.microbatch}{suffix}"


@dataclass(frozen=True)
class Placement:
    """Which stage runs which virtual stage, and so where each task's input comes from.

    Raises:
        ValueError: fewer than one stage or chunk.
    """

    stages: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.chunks < 1:
            raise ValueError(f"stages={self.stages}, chunks={self.chunks}: both must be at least 1")

    @property
    def last(self) -> int:
        """Index of the last virtual stage."""
        return self.stages * self.chunks - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """The position in the model of `chunk` on `stage`."""
        return chunk * self.stages + stage

    def needs_arrival(self, stage: int, task: Task) -> bool:
        """Whether the task's input comes from another virtual stage, rather than from data or its own F."""
        v = self.virtual_stage(stage, task.chunk)
        return v > 0 if task.kind is FORWARD else v < self.last

    def destination(self, stage: int, task: Task) -> tuple[int, Task] | None:
        """The (stage, task) that this task's output makes ready elsewhere; None at the model's ends."""
        step = 1 if task.kind is FORWARD else -1
        v = self.virtual_stage(stage, task.chunk) + step
        if not 0 <= v <= self.last:
            return None
        return v % self.stages, Task(task.kind, v // self.stages, task.microbatch)
