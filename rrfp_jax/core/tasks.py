"""Tasks and where they run: kinds, names, and the rules that say which task feeds which.

A model is cut into `stages * chunks` runs of consecutive layers, the *virtual stages*. A microbatch passes
through as

    F(v=0) -> F(1) -> ... -> F(last)        activations, from v to v + 1
                               |             same stage: the forward's output feeds its own backward
    B(v=0) <- B(1) <- ... <- B(last)        gradients, from v to v - 1

The backward of a virtual stage is one task, B, or two, I and W. I computes the gradient of its input, for
which the virtual stage before waits. W computes the gradient of its weights, any time later. Tasks are
written as in PyTorch's schedule files: kind and microbatch ("F3"), with the chunk where there are several
("F3.1").

Where virtual stage v runs is the placement's business:

    looped      chunk by chunk in the same direction: stage v % stages
    v           every other chunk in reverse, so that the last stage's chunks meet (arXiv:2405.15362)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args


class Kind(IntEnum):
    """What a task computes. An integer, because tasks are hashed and compared in the dispatch loop."""

    FORWARD = 0
    BACKWARD = 1  # both gradients in one task
    INPUT = 2  # the input's gradient
    WEIGHT = 3  # the weights' gradient

    @property
    def letter(self) -> str:
        """The one-letter name used in schedules and traces."""
        return KINDS[self].letter

    @property
    def direction(self) -> Direction:
        """What it is for."""
        return KINDS[self].direction

    @property
    def whole(self) -> Kind:
        """The kind that it is a part of, or itself."""
        return next((kind for kind in Kind if self in KINDS[kind].parts), self)


class Direction(IntEnum):
    """What a task is for, however the backward is cut, as hints and senders see it; numbered as kinds."""

    FORWARD = 0  # F
    BACKWARD = 1  # B or I, whichever a virtual stage runs for a microbatch
    WEIGHT = 3  # W


FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


class KindRow(NamedTuple):
    """All that distinguishes the tasks of one kind.

    Attributes:
        letter, title, colour: how it is written, called and drawn.
        direction: what it is for.
        parts: the kinds that together do the same; costs are told of these.
        after: the task of the same virtual stage and microbatch that is dispatched before it.
        flow: on virtual stage v its input comes from v - flow, and its output goes to v + flow; 0: neither.
        charge: 1: it takes its chunk's part of what may be in flight, for which admission must have room.
            -1: it frees that, and makes a gradient of the weights, which needs a place until it is added.
            0: neither, so that it may always run.
        holds: the field of a `Footprint` that says what a microbatch holds after it; None: nothing.
        seconds: the table of a `Workload` that says how long it takes; "" if its parts have theirs.
    """

    letter: str
    title: str
    colour: str
    direction: Direction
    parts: tuple[Kind, ...]
    after: Kind | None = None
    flow: int = 0
    charge: int = 0
    holds: Literal["held_after_forward_bytes", "held_after_input_bytes"] | None = None
    seconds: str = ""


KINDS = (
    KindRow(
        *("F", "forward", "#0072b2", Direction.FORWARD, (FORWARD,)),
        flow=1,
        charge=1,
        holds="held_after_forward_bytes",
        seconds="forward",
    ),
    KindRow(
        "B", "backward", "#d55e00", Direction.BACKWARD, (INPUT, WEIGHT), after=FORWARD, flow=-1, charge=-1
    ),
    KindRow(
        *("I", "input gradient", "#e69f00", Direction.BACKWARD, (INPUT,)),
        after=FORWARD,
        flow=-1,
        holds="held_after_input_bytes",
        seconds="backward_input",
    ),
    KindRow(
        *("W", "weight gradient", "#009e73", Direction.WEIGHT, (WEIGHT,)),
        after=INPUT,
        charge=-1,
        seconds="backward_weight",
    ),
)
"""One row for each kind, and the only table by kind. Colours are those of Okabe and Ito, which colour-blind
people can tell apart (https://jfly.uni-koeln.de/color)."""

LIVES = ((FORWARD, BACKWARD), (FORWARD, *KINDS[BACKWARD].parts))
"""What a microbatch may go through on a virtual stage, in a step with backward."""

CHARGES = tuple(row.charge for row in KINDS)
"""That column, for the dispatch loop: to read a row takes longer."""


def parts_of(kinds: Iterable[Kind]) -> set[Kind]:
    """The kinds that together do what these do, each of which has no parts."""
    return {part for kind in kinds for part in KINDS[kind].parts}


Shape: TypeAlias = Literal["looped", "v"]

SHAPES: Sequence[Shape] = get_args(Shape)


class Task(NamedTuple):
    """One unit of work of a stage: a kind of one model chunk for one microbatch."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        suffix = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.letter}{self.microbatch}{suffix}"

    @property
    def input(self) -> Input:
        """What it takes from another virtual stage, if its place in the model needs that."""
        kind, chunk, microbatch = self
        return Input(KINDS[kind].direction, chunk, microbatch)


class Input(NamedTuple):
    """What a chunk gets from another virtual stage: the activation for its F, the gradient for its B or I."""

    direction: Direction
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return str(Task(Kind(self.direction), self.chunk, self.microbatch))


class Output(NamedTuple):
    """What a chunk gives to another virtual stage: the activation of its F, the gradient of its B or I."""

    direction: Direction
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Placement:
    """Which stage runs which virtual stage, and so where each task's input comes from.

    Raises:
        ValueError: fewer than one stage or chunk, or an unknown shape.
    """

    stages: int
    chunks: int = 1
    shape: Shape = "looped"

    def __post_init__(self) -> None:
        if not all(isinstance(count, int) and count >= 1 for count in (self.stages, self.chunks)):
            raise ValueError(f"stages={self.stages!r}, chunks={self.chunks!r}: give whole numbers from 1")
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: choose 'looped' or 'v'")

    @property
    def last(self) -> int:
        """Index of the last virtual stage."""
        return self.stages * self.chunks - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """The position in the model of `chunk` on `stage`."""
        return chunk * self.stages + (self.stages - 1 - stage if self._reversed(chunk) else stage)

    def place(self, v: int) -> tuple[int, int]:
        """The (stage, chunk) that runs virtual stage `v`."""
        chunk, position = divmod(v, self.stages)
        return self.stages - 1 - position if self._reversed(chunk) else position, chunk

    @cached_property
    def _places(self) -> Mapping[tuple[int, int, int], tuple[int, int]]:
        """By stage, chunk and 1 or -1, the stage and chunk of the virtual stage after it or before it."""
        pairs = [*pairwise(map(self.place, range(self.last + 1)))]
        return {(*one, 1): after for one, after in pairs} | {(*one, -1): before for before, one in pairs}

    def beside(self, stage: int) -> set[int]:
        """The stages with a virtual stage right before or after one of a stage."""
        return {there for (own, *_), (there, _) in self._places.items() if own == stage}

    def needs_arrival(self, stage: int, task: Task) -> bool:
        """Whether the task's input comes from another virtual stage, not from data or its own F or I."""
        return (stage, task.chunk, -KINDS[task.kind].flow) in self._places

    def destination(self, stage: int, task: Task) -> tuple[int, Input] | None:
        """The stage that needs this task's output, and what it is there; None if no virtual stage does."""
        kind, chunk, microbatch = task
        row = KINDS[kind]
        place = self._places.get((stage, chunk, row.flow))
        return None if place is None else (place[0], Input(row.direction, place[1], microbatch))

    def source(self, stage: int, wanted: Input) -> tuple[int, Output] | None:
        """The stage that sends an input, and what it is there; None at the ends of the model."""
        direction, chunk, microbatch = wanted
        place = self._places.get((stage, chunk, -KINDS[direction].flow))
        return None if place is None else (place[0], Output(direction, place[1], microbatch))

    def _reversed(self, chunk: int) -> bool:
        return self.shape == "v" and chunk % 2 == 1
