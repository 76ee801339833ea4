"""Whether stages keep within their bytes in every state, counted a second time from what has happened.

Messages take memory at both ends: at the sender until they arrive, at the receiver from the moment that they
are sent. That is the worst that a transport can do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rrfp_jax.core.footprint import Chunks, Footprint, least_room, step_budgets
from rrfp_jax.core.hints import BF, BFW, FPriority, Ranked
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Direction, Input, Kind, Placement, Task
from tests.verification.exploration.cases import Anything, schedules
from tests.verification.exploration.machines import Case
from tests.verification.exploration.witness import Broken, Seen


@dataclass(frozen=True)
class Memory:
    """What microbatches take: by stage and bucket, the bucket of each microbatch, and each stage's room."""

    placement: Placement
    footprints: Sequence[Sequence[Chunks]]
    buckets: Sequence[int]
    rooms: Sequence[int]

    def check(self, seen: Sequence[Seen]) -> None:
        """Refuse a state, by what each stage has seen, in which one holds more than it has room for."""
        for stage, room in enumerate(self.rooms):
            held = self.held(seen, stage)
            if held > room:
                raise Broken(f"stage {stage} holds {held} bytes where there is room for {room}")

    def held(self, seen: Sequence[Seen], stage: int) -> int:
        """Bytes on a stage."""
        return sum(
            self._held(seen, stage, chunk, j)
            for j in range(len(self.buckets))
            for chunk in range(self.placement.chunks)
        )

    def _held(self, seen: Sequence[Seen], stage: int, chunk: int, j: int) -> int:
        own = self.footprints[stage][self.buckets[j]][chunk]
        forward = self._ran(seen, (stage, chunk), j, FORWARD)
        backward = self._ran(seen, (stage, chunk), j, BACKWARD, INPUT)
        size = 0
        v = self.placement.virtual_stage(stage, chunk)
        if v > 0:
            before = self.placement.place(v - 1)
            if not forward and self._ran(seen, before, j, FORWARD):
                size += own.activation_in_bytes
            arrived = Input(Direction.BACKWARD, before[1], j) in seen[before[0]].arrived
            size += own.gradient_out_bytes if backward and not arrived else 0
        if v < self.placement.last:
            after = self.placement.place(v + 1)
            arrived = Input(Direction.FORWARD, after[1], j) in seen[after[0]].arrived
            size += own.activation_out_bytes if forward and not arrived else 0
            if not backward and self._ran(seen, after, j, BACKWARD, INPUT):
                size += own.gradient_in_bytes
        size += own.held_after_forward_bytes if forward and not backward else 0
        halfway = self._ran(seen, (stage, chunk), j, INPUT) and not self._ran(seen, (stage, chunk), j, WEIGHT)
        return size + (own.held_after_input_bytes if halfway else 0)

    def _ran(self, seen: Sequence[Seen], place: tuple[int, int], j: int, *kinds: Kind) -> bool:
        stage, chunk = place
        return any(Task(kind, chunk, j) in seen[stage].dispatched for kind in kinds)


def drawn(seed: int, largest: int = 3) -> Case:
    """A random case of up to so many stages and microbatches, with barely enough room or nearly so."""
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
    return Case(
        rules=rules,
        budgets=tuple(budget for budget in budgets if budget is not None),
        any_choice=isinstance(schedule, Anything),
        memory=Memory(placement, footprints, buckets, rooms),
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
