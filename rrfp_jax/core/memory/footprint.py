"""What microbatches take of a stage's memory, and how many may be in flight so that it never runs out.

docs/memory.md has the proof. A message takes memory at both ends: at the sender from its program's dispatch
until it is delivered, at the receiver as soon as it is on its way. So a chunk of an admitted microbatch goes
through these phases:

    F still to come      activation that arrives (later chunks; the first chunk's F is what admits)
    F dispatched         held after F, and the activation sent or, once that is delivered, the gradient that
                         arrives: nobody computes a gradient before the activation is there
    I dispatched         held after I, and the gradient sent
    B or W dispatched    the gradient sent

Two things are on a stage without being admitted there: activations that came early, and gradients that are
sent and not delivered yet after the release. Both belong to microbatches that the stage before holds, because
it releases one only after its gradient has come. Suppose the stage before holds n microbatches at most. Then
the n largest messages are the *base*. It is taken off this stage's room, and a microbatch costs only what it
takes *beyond* its own share of the base:

    before its gradient is sent    all phases - max(activation, gradient)   the stage before holds it, too
    after that (split backward)    what is held for W                       the stage before may be done

Whatever the delays, a stage holds at most base + the costs of what is admitted. n follows from the limits of
the stage before, so `step_budgets` goes through the stages in order. It also holds every stage to so few
microbatches that the next one has room for one beside its base. So any budget works that is enough for one
microbatch at a time. What a program needs only while it runs is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from rrfp_jax.core.step_rules import Budget
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, Task


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one microbatch on one chunk of a stage.

    Attributes:
        activation_in_bytes, activation_out_bytes: that arrives for F, and that F sends. What arrives as data
            is not counted, nor what is sent and held as well.
        gradient_in_bytes, gradient_out_bytes: that arrives for B or I, and that it sends.
        held_after_forward_bytes: from F to B or I.
        held_after_input_bytes: from I to W.
        temporary_bytes: of the program of each kind ("F", "B", "I", "W"), besides arguments and results.
        transient_bytes: the same, and those of its arguments that are not held after it.
    """

    activation_in_bytes: int
    activation_out_bytes: int
    gradient_in_bytes: int
    gradient_out_bytes: int
    held_after_forward_bytes: int
    held_after_input_bytes: int
    temporary_bytes: Mapping[str, int]
    transient_bytes: Mapping[str, int]

    @property
    def most_transient_bytes(self) -> int:
        """Of the program that needs most."""
        return max(self.transient_bytes.values(), default=0)

    @property
    def forward_bytes(self) -> int:
        """From F on."""
        return self.held_after_forward_bytes + max(self.activation_out_bytes, self.gradient_in_bytes)

    @property
    def input_bytes(self) -> int:
        """From I on, or from B on, when only the gradient is left."""
        return self.held_after_input_bytes + self.gradient_out_bytes


Chunks: TypeAlias = Sequence[Footprint]
"""A microbatch on all chunks of a stage."""


def arrival(chunks: Chunks) -> int:
    """Bytes of a microbatch on a stage that has not admitted it yet, or has released it."""
    return max(chunks[0].activation_in_bytes, chunks[0].gradient_out_bytes)


def cost(chunks: Chunks) -> int:
    """Bytes beyond `arrival` of a microbatch in flight."""
    later = sum(
        max(chunk.activation_in_bytes, chunk.forward_bytes, chunk.input_bytes) for chunk in chunks[1:]
    )
    before = max(chunks[0].forward_bytes, chunks[0].input_bytes) + later - arrival(chunks)
    after = sum(chunk.input_bytes for chunk in chunks) - chunks[0].gradient_out_bytes
    return max(before, after, 0)


def least_room(steps: Iterable[Chunks]) -> int:
    """Bytes that a stage needs for its microbatches, one at a time, and another one's message."""
    known = list(steps)
    return max(map(cost, known)) + max(map(arrival, known))


def step_budgets(
    rooms: Sequence[int | None],
    footprints: Sequence[Sequence[Chunks]],
    buckets: Sequence[int],
    most: int | None = None,
) -> list[Budget | None]:
    """The budgets of all stages for a step under a hint.

    Args:
        rooms: bytes of each stage for microbatches; None for no limit.
        footprints: by stage and bucket.
        buckets: of each microbatch.
        most: microbatches in flight at most.

    Raises:
        ValueError: a stage has less than `least_room`.
    """
    budgets: list[Budget | None] = []
    ahead = 0  # most microbatches that the stage before may hold
    for stage, room in enumerate(rooms):
        mine = len(buckets) if most is None else min(most, len(buckets))
        if stage + 1 < len(rooms):
            mine = min(mine, _most_before(stage + 1, rooms[stage + 1], footprints[stage + 1], buckets))
        if room is None:
            budgets.append(None if mine == len(buckets) else Budget([0] * len(buckets), 0, mine))
        else:
            costs = _of_microbatches(map(cost, footprints[stage]), buckets)
            messages = _of_microbatches(map(arrival, footprints[stage]), buckets)
            limit = room - sum(sorted(messages, reverse=True)[:ahead])
            if limit < max(costs):
                raise ValueError(
                    f"stage {stage}: {room} bytes, and one microbatch at a time needs "
                    f"{least_room(footprints[stage])}"
                )
            mine = min(mine, sum(total <= limit for total in accumulate(sorted(costs))))
            budgets.append(Budget(costs, limit, mine))
        ahead = mine
    return budgets


def order_peaks(
    orders: Sequence[Sequence[Task]], footprints: Sequence[Sequence[Chunks]], buckets: Sequence[int]
) -> list[int]:
    """The most bytes that each stage may hold at once when it follows its order, whatever the delays."""
    peaks, ahead = [], 0
    for order, own in zip(orders, footprints, strict=True):
        messages = _of_microbatches(map(arrival, own), buckets)
        peak, ahead_next = _replayed(order, [own[bucket] for bucket in buckets])
        peaks.append(sum(sorted(messages, reverse=True)[:ahead]) + peak)
        ahead = ahead_next
    return peaks


def _replayed(order: Sequence[Task], microbatches: Sequence[Chunks]) -> tuple[int, int]:
    """The most bytes beyond arrivals, and the most microbatches, that are in flight in an order."""
    phases: dict[int, list[int]] = {}  # bytes by chunk of the microbatches in flight
    to_do = [2 * len(chunks) for chunks in microbatches]  # chunks' forwards, and their releasing tasks
    share = [0] * len(microbatches)  # what is not counted because the base has it
    held = most = most_held = 0
    for kind, chunk, j in order:
        chunks = microbatches[j]
        if j not in phases:
            phases[j] = [footprint.activation_in_bytes for footprint in chunks]
            share[j] = arrival(chunks)
            phases[j][0] = 0
        else:
            held -= max(sum(phases[j]) - share[j], 0)
        phases[j][chunk] = {
            FORWARD: chunks[chunk].forward_bytes,
            INPUT: chunks[chunk].input_bytes,
        }.get(kind, chunks[chunk].gradient_out_bytes)
        if chunk == 0 and kind in (BACKWARD, INPUT):
            share[j] = chunks[0].gradient_out_bytes
        to_do[j] -= kind is not INPUT
        if to_do[j]:
            held += max(sum(phases[j]) - share[j], 0)
        else:
            del phases[j]
        most, most_held = max(most, held), max(most_held, len(phases))
    return most, most_held


def _most_before(stage: int, room: int | None, own: Sequence[Chunks], buckets: Sequence[int]) -> int:
    """How many microbatches the stage before may hold, so that this one can hold one of its own."""
    if room is None:
        return len(buckets)
    rest = room - max(_of_microbatches(map(cost, own), buckets))
    messages = sorted(_of_microbatches(map(arrival, own), buckets), reverse=True)
    count = sum(total <= rest for total in accumulate(messages))
    return max(count, 1)  # 0: refused when it is this stage's turn


def _of_microbatches(by_bucket: Iterable[int], buckets: Sequence[int]) -> list[int]:
    known = list(by_bucket)
    return [known[bucket] for bucket in buckets]
