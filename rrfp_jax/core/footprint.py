"""What microbatches take of a stage's memory, and what may be in flight so that it never runs out.

tests/verification/memory_proof.md has the proof. `runtime/programs/stage_programs.py` decides which values a
microbatch holds, and makes the `Footprint`; `runtime/autodiff/residuals.py` chooses the residuals.

A message takes memory at both ends: at the sender from its program's dispatch until it is delivered, at the
receiver as soon as it is on its way. So a chunk of a microbatch goes through these phases:

    F still to come      the activation that arrives
    F dispatched         held after F, and the activation sent or, once delivered, the gradient that arrives
    I dispatched         held after I, and the gradient sent
    B or W dispatched    the gradient sent

Admission charges a chunk from its F to its B or W. What is there before and after, `arrival`, belongs to
microbatches that the virtual stage before has in flight, as it releases one only after its gradient has come.
Somebody else has charged it:

    the first chunk     the stage before: if it has n microbatches in flight on its first chunk at most, the n
                        largest arrivals are the *base* that is taken off this stage's room
    any later chunk     the chunk before on this stage, where a microbatch is in flight all the time

So a chunk in flight costs what it takes beyond its own arrival, and the arrival at the next chunk. Whatever
the delays, a stage holds at most base + what is charged. n follows from the limits of the stage before, so
`step_budgets` goes through the stages in order. It also holds every stage to so few microbatches that the
next one has room for one beside its base: any budget works that is enough for one microbatch at a time. What
a program needs only while it runs is not counted here.

A task is *early* from its dispatch until its input has been delivered. `early_bytes` is what a stage may hold
beside all this where each stage has a few early tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from rrfp_jax.core.step_rules import MOST_QUEUED, Budget
from rrfp_jax.core.tasks import FORWARD, KINDS, Kind, Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one microbatch on one chunk of a stage."""

    activation_in_bytes: int  # for F, without data
    activation_out_bytes: int  # of F, without what is sent and held
    gradient_in_bytes: int  # for B or I
    gradient_out_bytes: int  # of B or I
    held_after_forward_bytes: int  # from F to B or I
    held_after_input_bytes: int = 0  # from I to W
    temporary_bytes: Mapping[str, int] = field(default_factory=dict)  # by kind's letter
    dropped_bytes: Mapping[str, int] = field(default_factory=dict)  # of arguments that are not held after it

    def transient_bytes(self, kind: Kind) -> int:
        """What the program of this kind needs only while it runs."""
        return self.temporary_bytes.get(kind.letter, 0) + self.dropped_bytes.get(kind.letter, 0)

    @property
    def held_bytes(self) -> int:
        """The most that is held between its tasks."""
        return max(self.held_after_forward_bytes, self.held_after_input_bytes)

    @property
    def most_transient_bytes(self) -> int:
        """Transient bytes of the program that needs most."""
        return max(map(self.transient_bytes, Kind))

    def bytes_after(self, kind: Kind) -> int:
        """What is there from a dispatch of this kind to the next one: held, sent, or on its way here."""
        whole = max(self.activation_out_bytes, self.gradient_in_bytes)
        return self.held_after(kind) + (whole if KINDS[kind].flow > 0 else self.gradient_out_bytes)

    @cached_property
    def effects(self) -> Sequence[tuple[int, int, int, int]]:
        """By kind: what a task gets, what it sends, and what its dispatch adds, to stay and while it runs."""
        activation = self.activation_in_bytes, self.activation_out_bytes
        messages = {1: activation, 0: (0, 0), -1: (self.gradient_in_bytes, self.gradient_out_bytes)}
        found = []
        for kind, row in zip(Kind, KINDS, strict=True):
            arrives, leaves = messages[row.flow]
            held = self.held_after(kind) - (0 if row.after is None else self.held_after(row.after))
            found.append((arrives, leaves, held + leaves - arrives, self.transient_bytes(kind)))
        return found

    def held_after(self, kind: Kind) -> int:
        """What is held after a task of this kind; 0 if that ends the microbatch."""
        holds = KINDS[kind].holds
        return 0 if holds is None else getattr(self, holds)


def held_fields(sizes: Mapping[Kind, int]) -> dict[str, Any]:
    """The fields of a `Footprint` with what is held after tasks of these kinds, in bytes."""
    return {name: size for kind, size in sizes.items() if (name := KINDS[kind].holds) is not None}


Chunks: TypeAlias = Sequence[Footprint]
"""A microbatch on all chunks of a stage."""


def arrival(chunks: Chunks) -> int:
    """Bytes of a microbatch on a stage whose first chunk has not run yet, or is released."""
    return _arrivals(chunks)[0]


def costs(chunks: Chunks) -> list[int]:
    """Bytes of a microbatch in flight on each chunk, beyond what others are charged for."""
    own = _arrivals(chunks)
    return [
        max(chunk.bytes_after(FORWARD) + own[c + 1] - own[c], chunk.held_after_input_bytes, 0)
        for c, chunk in enumerate(chunks)
    ]


def _arrivals(chunks: Chunks) -> list[int]:
    """By chunk, and 0 for the one after the last."""
    return [*(max(chunk.activation_in_bytes, chunk.gradient_out_bytes) for chunk in chunks), 0]


MOST_EARLY = MOST_QUEUED
"""Early tasks of a stage where bytes are limited."""


def early_bytes(own: Sequence[Chunks]) -> int:
    """What a stage may hold beside its base and what is charged if each stage has `MOST_EARLY` early tasks.

    The input of an early task is there beside what its program makes. An activation may still be on its way
    when its gradient is: to an early F. And a gradient when its microbatch has been released on the chunk
    before: to an early B or I. Both are on one stage, or with several chunks on two.
    """
    chunks = [chunk for microbatch in own for chunk in microbatch]
    taken = max(max(chunk.activation_in_bytes, chunk.gradient_in_bytes) for chunk in chunks)
    sent = max(chunk.activation_out_bytes for chunk in chunks)
    unpaid = max(max(chunk.activation_in_bytes, chunk.gradient_out_bytes) for chunk in chunks)
    ways = 1 if len(chunks) == len(own) else 2
    return MOST_EARLY * (taken + ways * (sent + unpaid))


def least_room(steps: Iterable[Chunks]) -> int:
    """Bytes that a stage needs for its microbatches, one at a time, and another one's message."""
    known = list(steps)
    return max(sum(costs(chunks)) for chunks in known) + max(map(arrival, known))


def step_budgets(
    rooms: Sequence[int | None],
    footprints: Sequence[Sequence[Chunks]],
    buckets: Sequence[int],
    most: int | None = None,
    by_chunk: bool = True,
) -> list[Budget | None]:
    """The budgets of all stages for a step under a hint; ValueError if one has less than `least_room`.

    `rooms` are bytes of each stage for microbatches, of which `most` may be in flight; None for no limit.
    Footprints are by stage and bucket. With `by_chunk` each chunk is charged by itself.
    """
    costs_of = [_of_microbatches(map(costs, own), buckets) for own in footprints]
    dearest = [max(map(sum, own)) for own in costs_of]
    messages = [sorted(_of_microbatches(map(arrival, own), buckets), reverse=True) for own in footprints]
    budgets: list[Budget | None] = []
    ahead = 0  # most microbatches that the stage before may have in flight on its first chunk
    for stage, (room, own) in enumerate(zip(rooms, footprints, strict=True)):
        chunks = len(own[0])
        mine = len(buckets) if most is None else min(most * (chunks if by_chunk else 1), len(buckets))
        cap = len(buckets)
        if stage + 1 < len(rooms) and (room_after := rooms[stage + 1]) is not None:
            # So many that the next stage can hold one of its own; 0: refused when it is that one's turn.
            rest = room_after - dearest[stage + 1]
            cap = max(sum(total <= rest for total in accumulate(messages[stage + 1])), 1)
        if room is None:
            budgets.append(None if cap >= mine else Budget([[0] * len(buckets)] * chunks, 0, cap))
        else:
            charged = list(zip(*costs_of[stage], strict=True))
            limit = room - sum(messages[stage][:ahead])
            if limit < dearest[stage]:
                raise ValueError(
                    f"stage {stage}: {room} bytes, and one microbatch at a time needs {least_room(own)}"
                )
            each = charged[0] if by_chunk else map(sum, costs_of[stage])
            mine = min(mine, sum(total <= limit for total in accumulate(sorted(each))))
            budgets.append(Budget(charged, limit, cap if cap < mine else None))
        ahead = min(mine, cap)
    return budgets


def order_peaks(
    orders: Sequence[Sequence[Task]], footprints: Sequence[Sequence[Chunks]], buckets: Sequence[int]
) -> list[int]:
    """The most bytes that each stage may hold at once when it follows its order, whatever the delays."""
    peaks, ahead = [], 0
    for order, own in zip(orders, footprints, strict=True):
        messages = _of_microbatches(map(arrival, own), buckets)
        base = sum(sorted(messages, reverse=True)[:ahead])
        peak, ahead = _replayed(order, [own[bucket] for bucket in buckets])
        peaks.append(base + peak)
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
        phases[j][chunk] = chunks[chunk].bytes_after(kind)
        if chunk == 0 and KINDS[kind].flow < 0:
            share[j] = chunks[0].gradient_out_bytes
        to_do[j] -= KINDS[kind].charge != 0
        if to_do[j]:
            held += max(sum(phases[j]) - share[j], 0)
        else:
            del phases[j]
        most, most_held = max(most, held), max(most_held, len(phases))
    return most, most_held


def _of_microbatches(by_bucket: Iterable[T], buckets: Sequence[int]) -> list[T]:
    known = list(by_bucket)
    return [known[bucket] for bucket in buckets]
