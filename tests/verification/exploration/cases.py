"""The cases that are explored: what can be combined of placements, schedules, limits and agreements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.footprint import MOST_EARLY, Chunks, Footprint, early_bytes, least_room, step_budgets
from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.hints import BF, BFW, BPriority, FPriority, Hint, Ranked
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import NAMED, Schedule
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Direction,
    Input,
    Kind,
    Placement,
    Shape,
    Task,
)
from tests.support.drain import Drain
from tests.verification.exploration.space import Case, Ends
from tests.verification.exploration.witness import Broken, Seen

LARGEST = 3
"""Stages, microbatches, and limits; chunks go up to 2."""

SHAPES: Sequence[tuple[int, Shape]] = ((1, "looped"), (2, "looped"), (2, "v"))
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
            replace(case, ranks=size.ranks, protocol=protocol, ends=ends)
            for case, protocol, ends in itertools.product(found, get_args(GroupProtocol), get_args(Ends))
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


Early: TypeAlias = Collection[tuple[int, Input]]
"""By stage, the inputs of early tasks, which have not been delivered."""


@dataclass(frozen=True)
class Memory:
    """What microbatches take: by stage and bucket, the bucket of each microbatch, and each stage's room."""

    placement: Placement
    footprints: Sequence[Sequence[Chunks]]
    buckets: Sequence[int]
    rooms: Sequence[int]

    def check(self, seen: Sequence[Seen], early: Early) -> None:
        """Refuse a state, by what each stage has seen, in which one holds more than it has room for."""
        for stage, room in enumerate(self.rooms):
            held = self.held(seen, stage, early)
            if held > room:
                raise Broken(f"stage {stage} holds {held} bytes where there is room for {room}")

    def held(self, seen: Sequence[Seen], stage: int, early: Early = ()) -> int:
        """Bytes on a stage."""
        return sum(
            self._held(seen, stage, chunk, j, early)
            for j in range(len(self.buckets))
            for chunk in range(self.placement.chunks)
        )

    def _held(self, seen: Sequence[Seen], stage: int, chunk: int, j: int, early: Early) -> int:
        def delivered(to: tuple[int, int], direction: Direction) -> bool:
            own = Input(direction, to[1], j)
            return own in seen[to[0]].arrived and (to[0], own) not in early

        def is_early(direction: Direction) -> bool:
            return (stage, Input(direction, chunk, j)) in early

        own = self.footprints[stage][self.buckets[j]][chunk]
        forward = self._ran(seen, (stage, chunk), j, FORWARD)
        backward = self._ran(seen, (stage, chunk), j, BACKWARD, INPUT)
        size = 0
        v = self.placement.virtual_stage(stage, chunk)
        if v > 0:
            before = self.placement.place(v - 1)
            if is_early(Direction.FORWARD) or (not forward and self._ran(seen, before, j, FORWARD)):
                size += own.activation_in_bytes
            arrived = delivered(before, Direction.BACKWARD)
            size += own.gradient_out_bytes if backward and not arrived else 0
        if v < self.placement.last:
            after = self.placement.place(v + 1)
            arrived = delivered(after, Direction.FORWARD)
            size += own.activation_out_bytes if forward and not arrived else 0
            if is_early(Direction.BACKWARD) or (not backward and self._ran(seen, after, j, BACKWARD, INPUT)):
                size += own.gradient_in_bytes
        size += own.held_after_forward_bytes if forward and not backward else 0
        halfway = self._ran(seen, (stage, chunk), j, INPUT) and not self._ran(seen, (stage, chunk), j, WEIGHT)
        return size + (own.held_after_input_bytes if halfway else 0)

    def _ran(self, seen: Sequence[Seen], place: tuple[int, int], j: int, *kinds: Kind) -> bool:
        stage, chunk = place
        return any(Task(kind, chunk, j) in seen[stage].dispatched for kind in kinds)


def drawn(seed: int, largest: int = 3) -> Case:
    """A random case of up to so many stages and microbatches, with barely enough room or nearly so; every
    eighth has early tasks."""
    draw = random.Random(seed)
    stages, chunks = draw.choice([(2, 1), (2, 1), (largest, 1), (2, 2)])
    placement = Placement(stages, chunks, draw.choice(["looped", "v"]))
    microbatches = draw.randint(2, largest if chunks == 1 else 2)
    hints: list[Schedule] = [BF(), BFW(), FPriority()]
    both = (False, True)
    anything = [Anything(splits=split, chunks=by_chunk) for split in both for by_chunk in both]
    ranked = [hint for hint in schedules(placement, microbatches) if isinstance(hint, Ranked)]
    schedule = draw.choice([draw.choice(hints), draw.choice(anything), draw.choice(ranked)])
    buckets = tuple(draw.randrange(2) for _ in range(microbatches))
    footprints = list(footprints_of(draw, placement))
    rooms = [least_room([own[b] for b in set(buckets)]) + draw.randint(0, 6) for own in footprints]
    rules = StepRules(
        placement=placement,
        microbatches=microbatches,
        schedule=schedule,
        accumulation=draw.choice(["index", "arrival"]),
        spare_gradients=draw.randint(0, 2),
        limit=draw.choice([None, None, 2]),
    )
    budgets = step_budgets(rooms, footprints, buckets, rules.limit, rules.charges_by_chunk)
    early = MOST_EARLY if seed % 8 == 1 else 0  # each has many more states
    if early:
        used = [[own[bucket] for bucket in set(buckets)] for own in footprints]
        rooms = [room + early_bytes(own) for room, own in zip(rooms, used, strict=True)]
    return Case(
        rules=rules,
        budgets=tuple(budget for budget in budgets if budget is not None),
        any_choice=isinstance(schedule, Anything),
        memory=Memory(placement, footprints, buckets, rooms),
        early=early,
    )


def footprints_of(
    draw: random.Random, placement: Placement, unit: int = 1
) -> Iterator[list[list[Footprint]]]:
    """Random ones by stage and bucket, of two buckets; what one virtual stage sends the next one gets."""
    virtual_stages = range(placement.last + 1)
    activations = [[unit * draw.randint(1, 3) for _ in range(2)] for _ in virtual_stages]
    gradients = [[unit * draw.randint(1, 3) for _ in range(2)] for _ in virtual_stages]
    for stage in range(placement.stages):
        places = [placement.virtual_stage(stage, chunk) for chunk in range(placement.chunks)]
        yield [
            [
                Footprint(
                    activation_in_bytes=activations[v][bucket] if v > 0 else 0,
                    activation_out_bytes=activations[v + 1][bucket] if v < placement.last else 0,
                    gradient_in_bytes=gradients[v + 1][bucket] if v < placement.last else 0,
                    gradient_out_bytes=gradients[v][bucket] if v > 0 else 0,
                    held_after_forward_bytes=unit * draw.randint(0, 4),
                    held_after_input_bytes=unit * draw.randint(0, 5),
                    dropped_bytes={"F": unit * draw.randint(0, 2), "B": unit * draw.randint(0, 2)},
                )
                for v in places
            ]
            for bucket in range(2)
        ]
