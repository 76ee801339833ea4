"""Fixed orders for two chunks a stage in a V, whose first stage has the model's first and last layers."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rrfp_jax.core.orders import FixedOrder, require_placement
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task


class VOrder(FixedOrder):
    """An order for two chunks in a V, any number of stages and microbatches; `name` is the field's name."""

    name: ClassVar[str]

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        """Two chunks in a V."""
        return Placement(stages, 2, "v")

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Fewer microbatches than twice the stages are those of a larger step without the ones beyond."""
        require_placement(self.name, placement, chunks=2, shape="v")
        tasks = self._tasks(stage, placement.stages, max(microbatches, 2 * placement.stages))
        return [task for task in tasks if task.microbatch < microbatches]

    @abstractmethod
    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        """The order for at least twice as many microbatches as stages."""


class _Counters:
    """Hands out a stage's tasks: of each kind and chunk in microbatch order."""

    def __init__(self) -> None:
        self._given: dict[tuple[Kind, int], int] = {}

    def next(self, kind: Kind, chunk: int) -> Task:
        """The next microbatch's task of a kind and chunk; B and I are of one kind here."""
        what = (BACKWARD if kind is INPUT else kind, chunk)
        microbatch = self._given.get(what, 0)
        self._given[what] = microbatch + 1
        return Task(kind, chunk, microbatch)

    def given(self, kind: Kind, chunk: int) -> int:
        """How many of these have been handed out."""
        return self._given.get((BACKWARD if kind is INPUT else kind, chunk), 0)


@dataclass(frozen=True)
class ZBV(VOrder):
    """Two chunks in a V: no bubble if F, I and W take equally long, at 1F1B's memory (arXiv:2405.15362).

    Theory of operation. Before a stage can run its second chunk, microbatch 0 must have gone down to the last
    stage and up again; until then it runs first-chunk forwards. From then on it alternates between the chunks
    and runs I and W of a backward together; at the end it runs I's first, because others wait for them.
    """

    name: ClassVar[str] = "ZB-V"

    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        counters = _Counters()
        following = counters.next

        def whole(chunk: int) -> tuple[Task, Task]:
            return following(INPUT, chunk), following(WEIGHT, chunk)

        for _ in range(2 * (stages - stage) - 1):
            yield following(FORWARD, 0)
        for _ in range(stage):
            yield following(FORWARD, 1)
            yield following(FORWARD, 0)
        for _ in range(stages - stage):
            yield following(FORWARD, 1)
            yield from whole(1)
        while counters.given(FORWARD, 1) < microbatches:
            if counters.given(FORWARD, 0) < microbatches:
                yield following(FORWARD, 0)
            yield from whole(0)
            yield following(FORWARD, 1)
            yield from whole(1)
        for _ in range(stage):
            yield following(INPUT, 0)
            yield following(INPUT, 1)
        for _ in range(stages - stage):
            yield following(INPUT, 0)
            yield following(WEIGHT, 0)
        for chunk in (1, 0):
            while counters.given(WEIGHT, chunk) < microbatches:
                yield following(WEIGHT, chunk)


@dataclass(frozen=True)
class DualPipeV(VOrder):
    """DeepSeek's DualPipe cut in half: a V in which forwards meet backwards of the other chunk.

    Where DeepSeek runs a forward and a backward at once, to hide the one's communication behind the other's
    arithmetic, they follow one another here. In the steady state backwards are whole; at both ends they are
    split. Holds up to `2 * stages + 1` chunks of microbatches, half a microbatch more than 1F1B.
    Source: github.com/deepseek-ai/DualPipe, dualpipev.py (arXiv:2412.19437, section 3.2.1).
    """

    name: ClassVar[str] = "DualPipe-V"

    def _tasks(self, stage: int, stages: int, microbatches: int) -> Iterator[Task]:
        following = _Counters().next
        after = stages - stage - 1  # stages behind this one
        for _ in range(2 * after):
            yield following(FORWARD, 0)
        for _ in range(stage + 1):
            yield following(FORWARD, 0)
            yield following(FORWARD, 1)
        for _ in range(after):
            yield following(INPUT, 1)
            yield following(WEIGHT, 1)
            yield following(FORWARD, 1)
        for _ in range(microbatches - 2 * stages + stage + 1):
            yield following(FORWARD, 0)
            yield following(BACKWARD, 1)
            yield following(FORWARD, 1)
            yield following(BACKWARD, 0)
        for _ in range(after):
            yield following(BACKWARD, 1)
            yield following(FORWARD, 1)
            yield following(BACKWARD, 0)
        due: deque[Task] = deque()
        for number in range(2 * (stage + 1)):
            split = number > stage
            task = following(INPUT if split else BACKWARD, 1 - number % 2)
            due += [task._replace(kind=WEIGHT)] if split else []
            yield task
        for _ in range(after):
            yield due.popleft()
            task = following(INPUT, 0)
            due.append(task._replace(kind=WEIGHT))
            yield task
        yield from due
