"""Fixed orders of the field: each stage's tasks in the order in which they are dispatched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, KINDS, LIVES, WEIGHT, Kind, Placement, Task


class FixedOrder(ABC):
    """A listed order, followed strictly: a stage waits for the next task of its list."""

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"schedule {type(self).__name__}"

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        """Where it runs if `chunks` a stage are wanted: the nearest placement for which it is defined."""
        return Placement(stages)

    @abstractmethod
    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Every task of `stage` in the order in which they are dispatched.

        For every chunk and microbatch it holds F and either B, or I and later W.

        Raises:
            ValueError: the schedule is not defined for this placement or number of microbatches.
        """

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        """Whether the last virtual stage runs a B or I right after its F; see `StepRules.joined`."""
        stage, chunk = placement.place(placement.last)
        found = pairwise(self.order(stage, placement, microbatches))
        own = [(task, after) for task, after in found if task[:2] == (FORWARD, chunk)]
        return all(after[1:] == task[1:] and KINDS[after.kind].flow < 0 for task, after in own)


def split_of(order: Iterable[Task]) -> set[tuple[int, int]]:
    """The (chunk, microbatch) whose backward runs as I and W in an order: where it has a W."""
    return {(chunk, microbatch) for kind, chunk, microbatch in order if kind is WEIGHT}


@dataclass(frozen=True, repr=False)
class ListedOrder(FixedOrder):
    """An order that was written down, or found: `rows[stage]` are its tasks. For its own sizes only.

    `turns`: what `turns_back` is to say, so that orders of many steps have the same programs.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[Task, ...], ...]
    turns: bool | None = None

    @property
    def title(self) -> str:
        return "the order"

    def __repr__(self) -> str:
        """Short, and another for another order: processes compare what they are to run by its text."""
        digest = sha256(repr((self.rows, self.turns)).encode()).hexdigest()[:8]
        return f"ListedOrder({self.placement}, {self.microbatches} microbatches, {digest})"

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        """Its own; ValueError if it is for another number of stages."""
        if stages != self.placement.stages:
            raise ValueError(f"the order is for {self.placement.stages} stages, not for {stages}")
        return self.placement

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return super().turns_back(placement, microbatches) if self.turns is None else self.turns

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        own, given = (self.placement, self.microbatches), (placement, microbatches)
        if own != given:
            raise ValueError(f"the order is for {_sizes(*own)}, not for {_sizes(*given)}")
        return self.rows[stage]


@dataclass(frozen=True)
class GPipe(FixedOrder):
    """All forwards, then all backwards, both in microbatch order (Huang et al., arXiv:1811.06965)."""

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return False  # with one microbatch, too, so that all steps have the same programs

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """F0, F1, ..., B0, B1, ..."""
        require_placement("GPipe", placement, chunks=1)
        return [Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in range(microbatches)]


@dataclass(frozen=True)
class OneFOneB(FixedOrder):
    """Warm up with as many forwards as stages follow, then one forward, one backward (arXiv:1806.03377)."""

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Holds at most `stages - stage` microbatches at once."""
        require_placement("1F1B", placement, chunks=1)
        warmup = placement.stages - stage - 1
        return _alternate(_count(FORWARD, microbatches), _count(BACKWARD, microbatches), warmup)


@dataclass(frozen=True)
class Interleaved1F1B(FixedOrder):
    """1F1B over several looped chunks, in rounds of as many microbatches as stages (arXiv:2104.04473).

    The bubble is that of 1F1B divided by the number of chunks, at the cost of a longer warm-up.
    """

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        return Placement(stages, max(2, chunks))

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Warms up through all but the last chunk, and two tasks more for each stage that follows."""
        require_placement("interleaved 1F1B", placement, shape="looped")
        stages, chunks = placement.stages, placement.chunks
        if chunks < 2:
            raise ValueError("interleaved 1F1B needs several chunks a stage and got 1: give chunks=2 or more")
        if microbatches % stages:
            fitting = microbatches - microbatches % stages
            counts = " or ".join(str(count) for count in (fitting, fitting + stages) if count)
            raise ValueError(
                f"interleaved 1F1B needs a multiple of {stages}, its stages, as microbatches and got "
                f"{microbatches}: give {counts}"
            )
        rounds = [range(first, first + stages) for first in range(0, microbatches, stages)]
        forwards = [Task(FORWARD, c, j) for r in rounds for c in range(chunks) for j in r]
        backwards = [Task(BACKWARD, c, j) for r in rounds for c in reversed(range(chunks)) for j in r]
        return _alternate(forwards, backwards, 2 * (stages - stage - 1) + (chunks - 1) * stages)


@dataclass(frozen=True)
class ZBH1(FixedOrder):
    """1F1B with the backward split; weight gradients fill the bubble, at 1F1B's memory (arXiv:2401.10241)."""

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """W lags `stage` microbatches behind I, so that every stage holds as many as the first."""
        require_placement("ZB-H1", placement, chunks=1)
        return _zero_bubble(microbatches, placement.stages - stage - 1, stage)


@dataclass(frozen=True)
class ZBH2(FixedOrder):
    """ZB-H1 with about twice the microbatches in flight, which leaves no bubble (arXiv:2401.10241)."""

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Warms up with twice as many forwards; W lags twice as far."""
        require_placement("ZB-H2", placement, chunks=1)
        return _zero_bubble(microbatches, 2 * (placement.stages - stage - 1), 2 * stage)


def _sizes(placement: Placement, microbatches: int) -> str:
    chunks = "1 chunk" if placement.chunks == 1 else f"{placement.chunks} chunks ({placement.shape})"
    return f"{placement.stages} stages with {chunks} and {microbatches} microbatches"


def planned_order(
    schedule: FixedOrder, stage: int, placement: Placement, microbatches: int, forward_only: bool = False
) -> list[Task]:
    """A stage's fixed order, checked to hold each task once, after what it needs there."""
    order = list(schedule.order(stage, placement, microbatches) or ())
    if forward_only:
        order = [task for task in order if task.kind is FORWARD]
    chunks, after = range(placement.chunks), [row.after for row in KINDS]
    past = [[bytearray(microbatches) for _ in chunks] for _ in KINDS]

    def wrong(what: str) -> ValueError:
        return ValueError(f"{schedule.title}, stage {stage}: {what}")

    for task in order:
        kind, chunk, j = task
        if not (chunk in chunks and 0 <= j < microbatches):
            raise wrong(f"{task} does not belong there")
        if past[kind][chunk][j]:
            raise wrong(f"{task} is there twice")
        past[kind][chunk][j] = True
        before = after[kind]
        if before is not None and not past[before][chunk][j] and (needed := Task(before, chunk, j)) in order:
            raise wrong(f"{task} stands before {needed}, which it needs")
    lives, parts = ((FORWARD,),) if forward_only else LIVES, KINDS[BACKWARD].parts
    allowed = {tuple(kind in life for kind in Kind) for life in lives}
    for chunk in chunks:
        for j, found in enumerate(zip(*(rows[chunk] for rows in past), strict=True)):
            if found not in allowed:
                wanted = (FORWARD, *parts) if any(found[part] for part in parts) else lives[0]
                missing = next((kind for kind in wanted if not found[kind]), None)
                what = "is missing" if missing is not None else "does not belong there"
                raise wrong(f"{Task(BACKWARD if missing is None else missing, chunk, j)} {what}")
    return order


def _count(kind: Kind, microbatches: int) -> list[Task]:
    return [Task(kind, 0, j) for j in range(microbatches)]


def _alternate(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> list[Task]:
    """`warmup` forwards, then one forward and one backward in turns, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + list(backwards[len(forwards) - warmup :])


def _zero_bubble(microbatches: int, warmup: int, lag: int) -> list[Task]:
    """1F1B in which every I, once `lag` of them are ahead, is followed by the oldest W that is due."""
    order, weights = list[Task](), iter(_count(WEIGHT, microbatches))
    for task in _alternate(_count(FORWARD, microbatches), _count(INPUT, microbatches), warmup):
        order.append(task)
        if task.kind is INPUT and task.microbatch >= lag:
            order.append(next(weights))
    return [*order, *weights]


def require_placement(name: str, placement: Placement, chunks: int = 0, shape: str = "") -> None:
    """Refuse a placement for which a schedule is not defined."""
    remedy = "take another schedule, or leave the number of chunks to this one"
    if chunks not in (0, placement.chunks):
        only = "one chunk" if chunks == 1 else f"{chunks} chunks"
        raise ValueError(f"{name} is defined for {only} a stage, got {placement.chunks}: {remedy}")
    if shape not in ("", placement.shape):
        raise ValueError(f"{name} is defined for the {shape} placement, got {placement.shape}: {remedy}")
