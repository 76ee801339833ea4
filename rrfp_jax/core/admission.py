"""What a stage may hold: microbatches in flight, and gradients that wait for their turn.

**Admission** has two rules, so that memory suffices and stages never wait in a circle;
tests/verification/memory_proof.md has the proofs. Hints that reserve their memory (`hints.Ranked`) are
charged by chunk. Others do not know what they need next. Charged by chunk they fill a stage with the first
chunks of microbatches whose second ones then find no room, and become two to three times as slow at tight
limits (benchmarks/results/simulated.md); so for them microbatches are charged whole.

*By chunk.* A chunk of a microbatch is charged when its F is dispatched and freed when its B or W is. With

    h(k)    what microbatch k holds on this stage
    u(q)    what microbatch q has still to be charged there, for the chunks whose F is yet to come

an F may be dispatched if afterwards the stage is *safe in index order*: for every unfinished q

    u(q) + sum of h(k) over all k >= q  <=  limit.

So whenever all microbatches below q are finished, there is room for the rest of q, whatever else has run
ahead: the banker's algorithm (Dijkstra, EWD 623) for processes that come in a fixed order. F of microbatch j
adds its charge to the sums of q < j only, so it is admitted if the largest of these has room for it. A stage
keeps these sums for all q from the lowest unfinished one to the highest that has begun; above that, the sum
of q is the cost of q. All have a common part, the *level*, so that a charge changes either the sums below it,
or the level and the sums from it on: whichever are fewer.

*Whole.* A microbatch is charged for all its chunks at its first F and freed at its last B or W. It is
admitted if beside it and all that is held there is room for the dearest lower one that has not begun. Its
later tasks are never refused.

*Nothing waits for ever.* Take the lowest microbatch of the step that some stage has not finished. By either
rule each of its tasks is admitted wherever it is ready.

**Accumulation** makes results equal to the bit, whatever the dispatch order. With `"index"`, a chunk's
gradients are added in microbatch order. A backward may run ahead of its turn if a spare buffer can park its
gradient until then. With `"arrival"` each gradient is added as it comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from rrfp_jax.core.tasks import CHARGES, Task


class Admission(ABC):
    """What one stage holds, and what fits beside it.

    Costs are `[chunk][microbatch]`, in whatever unit the limit has: 1 each, or bytes. The limit is on the sum
    of what is held; one that the whole step fits into is treated as none.

    Raises:
        ValueError: a microbatch whose chunks cost more than the limit together could never end.
    """

    def __init__(self, costs: Sequence[Sequence[int]], limit: int | None) -> None:
        totals = list(map(sum, zip(*costs, strict=True)))
        if limit is not None:
            dearest = max(range(len(totals)), key=totals.__getitem__)
            if totals[dearest] > limit:
                raise ValueError(
                    f"limit={limit}: microbatch {dearest} costs {totals[dearest]}: it could never be admitted"
                )
        self._costs, self._totals = costs, totals
        self._to_free = [len(costs)] * len(totals)  # chunks, by microbatch
        self._limit = None if limit is not None and sum(totals) <= limit else limit
        self.held = 0

    @abstractmethod
    def admits(self, chunk: int, microbatch: int) -> bool:
        """Whether the F of a chunk may be dispatched now."""

    @abstractmethod
    def refuses_beyond(self, chunk: int, microbatch: int) -> bool:
        """Whether it is certain that this F and all higher ones are refused; False proves nothing."""

    @abstractmethod
    def admit(self, chunk: int, microbatch: int) -> None:
        """Account for an F that is dispatched."""

    @abstractmethod
    def release(self, chunk: int, microbatch: int) -> None:
        """Account for a B or W that is dispatched."""

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        """Whether what is still to come of a part of an order could follow this F; see `HintView`."""
        return True


_TO_COME, _CHARGED, _FREED = range(3)
"""States of a chunk of a microbatch."""


class ByChunk(Admission):
    """Charges each chunk of a microbatch from its F to its B or W; safe in index order."""

    def __init__(self, costs: Sequence[Sequence[int]], limit: int | None) -> None:
        super().__init__(costs, limit)
        self._cheapest, self._dearest = [min(own) for own in costs], max(self._totals)
        self._sums = list(self._totals)  # u(q) + sum of h(k) over k >= q, of those begun less the level
        self._level = 0
        self._states = [bytearray(len(self._totals)) for _ in costs]
        self._lowest = 0  # unfinished microbatch
        self._begun = 0  # above the highest microbatch that has begun

    def admits(self, chunk: int, microbatch: int) -> bool:
        limit = self._limit
        if limit is None or microbatch <= self._lowest:
            return True
        room = limit - self._costs[chunk][microbatch]
        return self.held + self._dearest <= room or self._largest(microbatch) <= room

    def refuses_beyond(self, chunk: int, microbatch: int) -> bool:
        if self._limit is None or microbatch <= self._lowest:
            return False
        return self._largest(microbatch) + self._cheapest[chunk] > self._limit

    def _largest(self, microbatch: int) -> int:
        """The largest sum from the lowest unfinished microbatch on, up to the one before this microbatch."""
        lowest, begun = self._lowest, self._begun
        if microbatch <= begun:
            return max(self._sums[lowest:microbatch]) + self._level
        rest = max(self._totals[max(lowest, begun) : microbatch])
        return max(rest, max(self._sums[lowest:begun]) + self._level) if lowest < begun else rest

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        if self._limit is None or task.microbatch <= self._lowest:  # the lowest must never wait
            return True
        room = self._limit - self._costs[task.chunk][task.microbatch]
        held, costs, states = self.held, self._costs, self._states
        for kind, chunk, microbatch in order[start:stop]:
            charge = CHARGES[kind]
            if charge > 0:
                if states[chunk][microbatch] == _TO_COME:
                    held += costs[chunk][microbatch]
                    if held > room:
                        return False
            elif charge < 0 and states[chunk][microbatch] != _FREED:
                held -= costs[chunk][microbatch]
        return True

    def admit(self, chunk: int, microbatch: int) -> None:
        cost = self._costs[chunk][microbatch]
        self.held += cost
        if self._limit is None:
            return
        self._states[chunk][microbatch] = _CHARGED
        sums, lowest, begun = self._sums, self._lowest, self._begun
        if microbatch >= begun:
            for q in range(begun, microbatch + 1):
                sums[q] -= self._level
            begun = self._begun = microbatch + 1
        if microbatch - lowest < begun - microbatch:
            for q in range(lowest, microbatch):
                sums[q] += cost
        else:
            self._level += cost
            for q in range(microbatch, begun):
                sums[q] -= cost

    def release(self, chunk: int, microbatch: int) -> None:
        cost = self._costs[chunk][microbatch]
        self.held -= cost
        self._to_free[microbatch] -= 1
        if self._limit is not None:
            self._states[chunk][microbatch] = _FREED
            for q in range(self._lowest, microbatch + 1):
                self._sums[q] -= cost
        while self._lowest < len(self._to_free) and not self._to_free[self._lowest]:
            self._lowest += 1


class Whole(Admission):
    """Charges a microbatch from its first F to its last B or W, and keeps room for the lower ones."""

    def __init__(self, costs: Sequence[Sequence[int]], limit: int | None) -> None:
        super().__init__(costs, limit)
        self._cheapest = min(self._totals)
        self._begun = bytearray(len(self._totals))
        self._lowest = 0  # microbatch that has not begun
        self._scanned = self._dearest = 0  # the largest cost of those not begun below a microbatch

    def admits(self, chunk: int, microbatch: int) -> bool:
        if chunk or self._limit is None:
            return True
        needed = self.held + self._totals[microbatch]
        if microbatch > self._lowest:
            needed += self._reserve(microbatch)
        return needed <= self._limit

    def refuses_beyond(self, chunk: int, microbatch: int) -> bool:
        if chunk or self._limit is None or self.admits(chunk, microbatch):
            return False
        reserve = max(self._totals[microbatch], self._reserve(microbatch))
        return self.held + self._cheapest + reserve > self._limit

    def admit(self, chunk: int, microbatch: int) -> None:
        if chunk:
            return
        self._begun[microbatch] = 1
        self.held += self._totals[microbatch]
        if microbatch == self._lowest:
            lowest = self._begun.find(0, microbatch)
            self._lowest = lowest if lowest >= 0 else len(self._begun)
        self._scanned, self._dearest = self._lowest, 0

    def release(self, chunk: int, microbatch: int) -> None:
        self._to_free[microbatch] -= 1
        if not self._to_free[microbatch]:
            self.held -= self._totals[microbatch]

    def _reserve(self, microbatch: int) -> int:
        if microbatch < self._scanned:
            self._scanned, self._dearest = self._lowest, 0
        for j in range(self._scanned, microbatch):
            if not self._begun[j]:
                self._dearest = max(self._dearest, self._totals[j])
        self._scanned = max(self._scanned, microbatch)
        return self._dearest


Accumulation: TypeAlias = Literal["index", "arrival"]

SPARE_GRADIENTS = 2
"""Spare buffers unless told otherwise: the fewest that cost at most 2 % in the median where transfers are
exponential with a mean of up to a forward (`python -m benchmarks reordering`)."""


class Accumulator:
    """Turn and parked gradients of one stage; `spare` buffers, shared by its chunks, have place for those."""

    def __init__(self, chunks: int, mode: Accumulation, spare: int) -> None:
        if mode not in ("index", "arrival"):
            raise ValueError(f"accumulation={mode!r}: choose 'index' or 'arrival'")
        if spare < 0:
            raise ValueError(f"spare_gradients={spare}: must not be negative")
        self.spare, self.parked = spare, 0
        self._ordered = mode == "index"
        self._turn = [0] * chunks
        self._parked: list[set[int]] = [set() for _ in range(chunks)]

    def accepts(self, chunk: int, microbatch: int) -> bool:
        """Whether the gradient has a place now; if the lowest ready one has none, no higher one has."""
        return not self._ordered or microbatch == self._turn[chunk] or self.parked < self.spare

    def add(self, chunk: int, microbatch: int) -> tuple[int, ...]:
        """Take in a gradient; the microbatches of this chunk to add now, in order (none if it was parked)."""
        if not self._ordered:
            return (microbatch,)
        turn, parked = self._turn[chunk], self._parked[chunk]
        if microbatch != turn:
            parked.add(microbatch)
            self.parked += 1
            return ()
        due = [microbatch]
        while (turn := turn + 1) in parked:
            parked.remove(turn)
            self.parked -= 1
            due.append(turn)
        self._turn[chunk] = turn
        return tuple(due)


def most_parked(order: Iterable[Task], chunks: int) -> int:
    """How many gradients a stage has parked at once that runs its tasks in this order, added by index."""
    tasks = list(order)
    accumulator, most = Accumulator(chunks, "index", len(tasks)), 0
    for kind, chunk, microbatch in tasks:
        if CHARGES[kind] < 0:
            accumulator.add(chunk, microbatch)
            most = max(most, accumulator.parked)
    return most
