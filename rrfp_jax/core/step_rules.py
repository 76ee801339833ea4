"""What a step's stages agree on, and what one of them may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation, most_parked
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.orders import FixedOrder, planned_order, split_of
from rrfp_jax.core.progress import Split, StageTasks, TaskIndex, all_tasks
from rrfp_jax.core.schedules import Schedule, name_of
from rrfp_jax.core.tasks import Kind, Placement, Task

MOST_QUEUED = 2
"""Programs on a device at once, the running one and the next, unless a group of processes decides ahead."""


def default_max_in_flight(stages: int) -> int:
    """Microbatches in flight on a stage if nothing else limits them: two per stage; more gain little."""
    return 2 * stages


@dataclass(frozen=True)
class Budget:
    """What a stage may hold in bytes: `costs[chunk][microbatch]`, and their limit.

    With `most`, no more microbatches than that may be in flight on its first chunk, whatever they cost.
    """

    costs: Sequence[Sequence[int]]
    limit: int
    most: int | None = None

    def admits(self, count: int) -> bool:
        """Whether so many microbatches may be in flight together, whichever they are."""
        dearest = sorted(map(sum, zip(*self.costs, strict=True)), reverse=True)[:count]
        return sum(dearest) <= self.limit and (self.most is None or len(dearest) <= self.most)


Budgets: TypeAlias = Sequence[Budget | None] | None
"""What each stage may hold in bytes; None: whatever it needs."""

Charges: TypeAlias = tuple[Sequence[Sequence[int]], int | None]
"""What microbatches cost, `[chunk][microbatch]`, and the limit on the sum."""


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What all stages of a step agree on.

    Attributes:
        limit: on what is in flight on a stage under a hint; None for no limit. L is, charged whole (also in a
            forward-only pass), L microbatches; by chunk, L times the chunks of a stage, in chunks of any
            microbatches.
        spare_gradients: gradients that may be parked on a stage until their turn comes.
        forward_only: evaluation: no backward; a microbatch leaves when its last F on the stage is dispatched.

    Raises:
        ValueError: no microbatches.
    """

    placement: Placement
    microbatches: int
    schedule: Schedule
    limit: int | None = None
    accumulation: Accumulation = "index"
    spare_gradients: int = SPARE_GRADIENTS
    forward_only: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches}: a step needs at least one")

    @property
    def hint(self) -> Hint | None:
        """What ranks the runnable tasks; None for a fixed order."""
        return None if isinstance(self.schedule, FixedOrder) else self.schedule

    @cached_property
    def name(self) -> str:
        """The schedule's; see `name_of`."""
        return name_of(self.schedule)

    @cached_property
    def joined(self) -> bool:
        """Whether the last layers' forward is part of their backward, which follows at once: one program."""
        return not self.forward_only and self.schedule.turns_back(self.placement, self.microbatches)

    @cached_property
    def unadded_gradients(self) -> int:
        """Most gradients that a stage has beside its sums: those that wait for their turn."""
        if self.forward_only or self.accumulation == "arrival":
            return 0
        if not isinstance(self.schedule, FixedOrder):
            return self.spare_gradients
        most = max(most_parked(own.order, self.placement.chunks) for own in self.stages)
        return min(most, self.spare_gradients)

    @property
    def admission_limit(self) -> int | None:
        """Most microbatches that admission lets in flight; None for fixed orders."""
        return None if isinstance(self.schedule, FixedOrder) else self.limit

    @property
    def charges_by_chunk(self) -> bool:
        """Whether each chunk of a microbatch is charged by itself (core/admission.py)."""
        return self.hint is None or self.hint.by_chunk

    def backward_kinds(self, stage: int) -> list[frozenset[Kind]]:
        """For each chunk of a stage, whether there are B's among its tasks, I's and W's, or both."""
        return self.stages[stage].tasks.backward_kinds

    @cached_property
    def programs(self) -> tuple[bool, list[list[frozenset[Kind]]]]:
        """What tells the programs of two steps apart: whether the last are joined, and kinds by stage."""
        return self.joined, [own.tasks.backward_kinds for own in self.stages]

    @cached_property
    def names(self) -> TaskIndex:
        """All tasks that there may be in the step."""
        return all_tasks(self.placement.chunks, self.microbatches)

    @cached_property
    def stages(self) -> Sequence[StageRules]:
        """What they say of each stage; ValueError for a fixed order that does not hold every task once."""
        return [StageRules(self, stage) for stage in range(self.placement.stages)]


class StageRules:
    """What the rules of a step say of one stage.

    Attributes:
        hint: ranks its tasks, from `state` on at the beginning of a step; None for a fixed order.
        waits: whether the hint may choose nothing though a task can run.
        order: without a hint.
        charges: what admission keeps count of if there is no budget in bytes.
        by_chunk: see `StepRules.charges_by_chunk`.
    """

    def __init__(self, rules: StepRules, stage: int) -> None:
        sizes = stage, rules.placement, rules.microbatches
        self.hint, self.order, self.state, self.waits = rules.hint, list[Task](), None, False
        split: Split = ()
        if isinstance(rules.schedule, FixedOrder):
            self.order = planned_order(rules.schedule, *sizes, rules.forward_only)
            split = split_of(self.order)
        else:
            self.state, self.waits = rules.schedule.start(*sizes), rules.schedule.waits
            split = () if rules.forward_only else rules.schedule.split(*sizes)
        self.tasks = StageTasks(stage, rules.placement, rules.names, split, rules.forward_only)
        self.charges, self.by_chunk = charges_of(rules, None), rules.charges_by_chunk


def charges_of(rules: StepRules, budget: Budget | None) -> list[Charges]:
    """What admission keeps count of on a stage: first numbers, then the budget's bytes, if there is one."""
    chunks, microbatches = rules.placement.chunks, rules.microbatches
    applies = rules.hint is not None
    limit = None if rules.admission_limit is None else rules.admission_limit * chunks
    found: list[Charges] = [([[1] * microbatches] * chunks, limit)]
    if budget is not None:
        found.append((budget.costs, budget.limit if applies else None))
        if applies and budget.most is not None:
            found.append(([[1] * microbatches, *[[0] * microbatches] * (chunks - 1)], budget.most))
    if rules.forward_only:  # charged at its first F, as it is freed whole
        rest = [[0] * microbatches] * (chunks - 1)
        found = [([[sum(own) for own in zip(*costs, strict=True)], *rest], most) for costs, most in found]
    return found


Bucket: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
"""The shapes of a microbatch: (name, shape, dtype) of every field, sorted by name."""


@lru_cache(maxsize=128)
def dtype_name(dtype: Any) -> str:
    """The name of one of NumPy's dtypes, which put it together at every look."""
    return str(dtype.name)


def bucket_name(bucket: Bucket) -> str:
    """A bucket as text: "labels int32[4,128] tokens int32[4,128]"."""
    return " ".join(f"{name} {dtype}[{','.join(map(str, shape))}]" for name, shape, dtype in bucket)
