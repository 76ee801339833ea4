"""Fixed orders for two chunks a stage in a V, whose first stage has the model's first and last layers.

V-Min, V-Half, V-ZB: orders that hold a third, half, or all of what 1F1B holds (arXiv:2405.15362).

Theory of operation. Let every task of a chunk take one unit of time. Microbatch j does on every stage what
microbatch 0 does there, `PERIOD` units later for each microbatch in between. A stage has six tasks of each,
so it is busy all the time. What microbatch 0 does when is the *building block*. It goes down the V and up
again, forward and then backward:

    F0  stage 0 to p - 1, `down` units from one to the next          I1  the same
    F1  stage p - 1 to 0, `up` units from one to the next            I0  the same

and may wait for some units before F1, I1 and I0. Two things are asked of a block. No two of a stage's tasks
may fall on the same unit of a period. And microbatches should be released soon: what a stage holds is the sum
of its chunks' times from F to W, over the period. Those times are about 2 p (down + up) in all, so that with
p stages it holds about p (down + up) / 6 microbatches.

    block     down  up   holds at most, in microbatches
    V-Min     1     1    (p + 4) // 3
    V-Half    1     2    (p + 2) // 2
    V-ZB      3     3    p

A chunk's W falls on one of the two units that the others leave free, whichever comes sooner after its I.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import ClassVar

from rrfp_jax.core.orders import FixedOrder, require_placement
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Direction, Kind, Placement, Task


class VOrder(FixedOrder):
    """An order for two chunks in a V, any number of stages and microbatches; `name` is the field's name."""

    name: ClassVar[str]

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        return Placement(stages, 2, "v")

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Fewer microbatches than twice the stages are those of a larger step without the ones beyond."""
        require_placement(self.name, placement, chunks=2, shape="v")
        tasks = self._tasks(stage, placement.stages, max(microbatches, 2 * placement.stages))
        return [task for task in tasks if task.microbatch < microbatches]

    @abstractmethod
    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        """The order for at least twice as many microbatches as stages."""


F0, F1, B0, B1, I0, I1, W0, W1 = product((FORWARD, BACKWARD, INPUT, WEIGHT), (0, 1))


def _named(*stretches: tuple[int, Sequence[tuple[Kind, int]]]) -> Iterator[Task]:
    """The tasks of stretches (kinds and chunks), each of which comes so many times.

    On each chunk F's go by microbatch, and so do B's with I's; a W is that of its oldest I without one.
    """
    counts: dict[tuple[Direction, int], Iterator[int]] = defaultdict(count)
    due: dict[int, deque[int]] = defaultdict(deque)
    for times, stretch in stretches:
        for kind, chunk in times * [*stretch]:
            j = due[chunk].popleft() if kind is WEIGHT else next(counts[KINDS[kind].direction, chunk])
            if kind is INPUT:
                due[chunk].append(j)
            yield Task(kind, chunk, j)


@dataclass(frozen=True)
class ZBV(VOrder):
    """Two chunks in a V: no bubble if F, I and W take equally long, at 1F1B's memory (arXiv:2405.15362).

    Theory of operation. Before a stage can run its second chunk, microbatch 0 must have gone down to the last
    stage and up again; until then it runs first-chunk forwards. From then on it alternates between the chunks
    and runs I and W of a backward together; at the end it runs I's first, because others wait for them.
    """

    name: ClassVar[str] = "ZB-V"

    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        rest = stages - stage
        return _named(
            (2 * rest - 1, [F0]),
            (stage, [F1, F0]),
            (rest, [F1, I1, W1]),
            (microbatches - 2 * stages + stage + 1, [F0, I0, W0, F1, I1, W1]),
            (rest - 1, [I0, W0, F1, I1, W1]),  # all F's of the first chunk have run
            (stage, [I0, I1]),
            (rest, [I0, W0]),
            (stage, [W1]),
            (stage, [W0]),
        )


@dataclass(frozen=True)
class DualPipeV(VOrder):
    """DeepSeek's DualPipe cut in half: a V in which forwards meet backwards of the other chunk.

    Where DeepSeek runs a forward and a backward at once, to hide the one's communication behind the other's
    arithmetic, they follow one another here. In the steady state backwards are whole; at both ends they are
    split. Holds up to `2 * stages + 1` chunks of microbatches, half a microbatch more than 1F1B.
    Source: github.com/deepseek-ai/DualPipe, dualpipev.py (arXiv:2412.19437, section 3.2.1).
    """

    name: ClassVar[str] = "DualPipe-V"

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return False  # of few microbatches, too

    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        after = stages - stage - 1  # stages behind this one
        # The chunks of the last backwards, of which the second half are split.
        ends = [1 - number % 2 for number in range(2 * stage + 2)]
        late = [*((WEIGHT, chunk) for chunk in ends[stage + 1 :]), *[W0] * after]
        return _named(
            (2 * after, [F0]),
            (stage + 1, [F0, F1]),
            (after, [I1, W1, F1]),
            (microbatches - 2 * stages + stage + 1, [F0, B1, F1, B0]),
            (after, [B1, F1, B0]),
            (1, [(BACKWARD, chunk) for chunk in ends[: stage + 1]]),
            (1, [(INPUT, chunk) for chunk in ends[stage + 1 :]]),
            *((1, [weight, I0]) for weight in late[:after]),
            (1, late[after:]),
        )


PERIOD = 6
"""Units of a period: F, I and W of two chunks."""


class _Block(VOrder):
    """The order that repeats a building block; `slopes` are the units from stage to stage, down and up."""

    slopes: ClassVar[tuple[int, int]]

    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        down, up = self.slopes
        turning, starting, returning = self._waits(stages)
        there_and_back = (down + up) * (stages - 1)
        up_at_0 = there_and_back + 1 + turning
        back_at_0 = up_at_0 + 1 + starting
        end_at_0 = back_at_0 + there_and_back + 1 + returning
        block = {  # when microbatch 0's tasks run here, in units
            F0: down * stage,
            F1: up_at_0 - up * stage,
            I1: back_at_0 + down * stage,
            I0: end_at_0 - up * stage,
        }
        units = (block | _weights(block)).items()
        timed = [(unit + PERIOD * j, Task(*which, j)) for which, unit in units for j in range(microbatches)]
        return (task for _, task in sorted(timed))

    def _waits(self, stages: int) -> tuple[int, int, int]:
        """Units to wait before F1, I1 and I0; none where the slopes alone keep a stage's tasks apart."""
        return 0, 0, 0


def _weights(block: dict[tuple[Kind, int], int]) -> dict[tuple[Kind, int], int]:
    """Both W's on the free units of the period, as early as possible together."""
    free = sorted(set(range(PERIOD)) - {unit % PERIOD for unit in block.values()})
    pairs = [zip((block[I0] + 1, block[I1] + 1), units, strict=True) for units in (free, free[::-1])]
    choices = ([after + (unit - after) % PERIOD for after, unit in pair] for pair in pairs)
    return dict(zip((W0, W1), min(choices, key=sum), strict=True))


@dataclass(frozen=True)
class VMin(_Block):
    """Two chunks in a V at about a third of 1F1B's memory: `(stages + 4) // 3` microbatches."""

    name: ClassVar[str] = "V-Min"
    slopes: ClassVar[tuple[int, int]] = (1, 1)

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return not self._waits(placement.stages)[1]  # before I1; of few microbatches, too

    def _waits(self, stages: int) -> tuple[int, int, int]:
        # I1 follows F1 on the first stage, 2 p units after F0: where p is a multiple of 3 they would meet.
        return 0, 2 if stages % 3 == 0 else 0, 0


@dataclass(frozen=True)
class VHalf(_Block):
    """Two chunks in a V at about half of 1F1B's memory: `(stages + 2) // 2` microbatches."""

    name: ClassVar[str] = "V-Half"
    slopes: ClassVar[tuple[int, int]] = (1, 2)

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return False  # of few microbatches, too

    def _waits(self, stages: int) -> tuple[int, int, int]:
        # F1 and I0 approach F0 and I1 by 3 units a stage, so F0 and I1 must be 3 units apart in the period:
        # I1 runs on the first stage 3 p units after F0, and the waits before it.
        return 1, 0 if stages % 2 else 3, 0


@dataclass(frozen=True)
class VZB(_Block):
    """Two chunks in a V at 1F1B's memory, spread evenly: a message may take two units without delay.

    That is as long as a forward of both chunks. So as a hint it is a little ahead of ZB-V, which packs its
    tasks closer, where transfers are as long or longer.
    """

    # All four tasks keep their distance from stage to stage: 0, 1, 2 and 3 units in the period.
    name: ClassVar[str] = "V-ZB"
    slopes: ClassVar[tuple[int, int]] = (3, 3)
