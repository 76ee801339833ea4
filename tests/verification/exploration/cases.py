"""The cases that are explored: what can be combined of placements, schedules, limits and agreements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.hints import BPriority, Hint, Ranked
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import NAMED, Schedule
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Direction, Placement, Shape
from tests.support.drain import Drain
from tests.verification.exploration.machines import Case

LARGEST = 3
"""Stages, microbatches, and limits; chunks go up to 2."""

SHAPES: Sequence[tuple[int, Shape]] = ((1, "looped"), (2, "looped"), (2, "v"))
PROTOCOLS: Sequence[tuple[GroupProtocol, bool]] = (
    ("leader", True),
    ("leader", False),
    ("unanimous", True),
    ("unanimous", False),
)
"""With collectives in the programs, and without."""
BUDGETS, BUDGETS_OF_ANY = 2, 12


@dataclass(frozen=True)
class Anything(BPriority):
    """Stands for every hint there can be: explored with `any_choice`, which takes every task in its turn."""

    directions: tuple[Direction, ...] = (Direction.BACKWARD, Direction.FORWARD, Direction.WEIGHT)
    splits: bool = False
    chunks: bool = False

    @property
    def by_chunk(self) -> bool:
        """As it is told."""
        return self.chunks

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """Everything or nothing."""
        chunks = range(placement.chunks if self.splits else 0)
        return {(c, j) for c in chunks for j in range(microbatches)}


@dataclass(frozen=True, order=True)
class Size:
    """What a table of results has one line for. Ordered by about how long a case takes."""

    effort: int
    ranks: int
    stages: int
    chunks: int
    shape: Shape
    microbatches: int

    def __str__(self) -> str:
        where = f"{self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks"
        return where + (f" ({self.shape})" if self.chunks > 1 else "") + f", groups of {self.ranks}"


def sizes() -> list[Size]:
    """All of them, the smallest first."""
    numbers = range(1, LARGEST + 1)
    combined = itertools.product(numbers, numbers, SHAPES, (1, 2))
    found = [
        Size(stages * chunks * microbatches * ranks**2, ranks, stages, chunks, shape, microbatches)
        for stages, microbatches, (chunks, shape), ranks in combined
        if shape == "looped" or stages > 1  # on one stage both are the same
    ]
    return sorted(found)


def cases(size: Size) -> list[Case]:
    """All cases of a size, in an order that is random and always the same."""
    placement = Placement(size.stages, size.chunks, size.shape)
    found = [
        Case(rules=rules, budgets=budgets, any_choice=isinstance(rules.schedule, Anything))
        for rules, budgets in _bounded(placement, size.microbatches)
    ]
    if size.ranks > 1:
        found = [
            replace(case, ranks=size.ranks, protocol=protocol, collectives=collectives)
            for case, (protocol, collectives) in itertools.product(found, PROTOCOLS)
            if not case.any_choice
        ]
    random.Random(0).shuffle(found)
    return found


def schedules(placement: Placement, microbatches: int) -> list[Schedule]:
    """Hints and fixed orders that are defined there, each fixed order as rankings too, and anything."""
    hints: list[Schedule] = [hint for hint in NAMED.values() if isinstance(hint, Hint)]
    orders = [order for order in NAMED.values() if isinstance(order, FixedOrder)]
    orders = [order for order in orders if _is_defined(order, placement, microbatches)]
    rankings = [Ranked(order, reserve) for order in orders for reserve in (True, False)]
    anything = [
        Anything(splits=splits, chunks=chunks) for splits in (False, True) for chunks in (False, True)
    ]
    return [*hints, *orders, *rankings, *anything]


def _is_defined(order: FixedOrder, placement: Placement, microbatches: int) -> bool:
    try:
        return bool(order.order(0, placement, microbatches))
    except ValueError:
        return False


def _bounded(
    placement: Placement, microbatches: int
) -> Iterator[tuple[StepRules, tuple[Budget, ...] | None]]:
    """Every schedule with every accumulation, within every limit and some budgets."""
    accumulations: list[tuple[Accumulation, int]] = [("index", spare) for spare in range(microbatches)]
    numbers = range(1, microbatches + 1)
    chosen = random.Random(str((placement, microbatches)))
    for schedule, (mode, spare) in itertools.product(
        schedules(placement, microbatches), [*accumulations, ("arrival", 0)]
    ):
        rules = StepRules(
            placement=placement,
            microbatches=microbatches,
            schedule=schedule,
            accumulation=mode,
            spare_gradients=spare,
        )
        if isinstance(schedule, FixedOrder):
            yield rules, None
            continue
        for limit in numbers:
            yield replace(rules, limit=limit), None
        if not isinstance(schedule, Anything):
            for limit in range(1, microbatches * placement.chunks):
                yield replace(rules, schedule=Drain(schedule, limit)), None
        for _ in range(BUDGETS_OF_ANY if isinstance(schedule, Anything) else BUDGETS):
            yield (
                rules,
                tuple(_budget(chosen, placement.chunks, microbatches) for _ in range(placement.stages)),
            )


def _budget(chosen: random.Random, chunks: int, microbatches: int) -> Budget:
    """Unequal costs, and a limit that the dearest microbatch just fits or nearly so."""
    costs = [[chosen.randint(1, 3) for _ in range(microbatches)] for _ in range(chunks)]
    most = chosen.choice([None, None, 1, 2])
    return Budget(costs, max(map(sum, zip(*costs, strict=True))) + chosen.randint(0, 2), most)
