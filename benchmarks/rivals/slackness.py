"""The rule by which PipeMorph (Adaptra, arXiv:2504.19232) orders a step whose links are slow.

Neighbours differ in how many forwards they begin with, their *slackness*: with c_i what the link after stage
i takes and t_i what a forward takes there,

    warm-up of the last stage = 1,    of stage i = that of stage i + 1, and 2 + ceil(c_i / t_i) more.

Then nobody waits for a message in the steady state. After its warm-up a stage waits for its first I. From
then on I goes before F and F before W, whichever is ready, by times measured before. In the step itself the
order that came out is followed strictly. The rule is that of the public code (wutianyuan1/PipeMorph,
`zerobubble/pipeline_simulator/policy.py`); this is not that code.

That code does not say what gives way where memory does not suffice. Here two ways are tried on what was
measured, and the faster one is taken: no stage begins with more forwards than the limit; or every link has a
slackness of 1, and what is left goes to the slowest links first, as much as they need.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rrfp_jax.core.hints import Hint, HintView
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Direction, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Table, Workload, WorkloadCosts
from rrfp_jax.trace.records import StepTrace

SLACK = 2
"""That neighbours have where links take no time."""

AFTER_WARM_UP = (Direction.BACKWARD, Direction.FORWARD, Direction.WEIGHT)


@dataclass(frozen=True)
class Slackness(Hint):
    """So many forwards first, by stage, then an I, then I before F before W."""

    warm_ups: tuple[int, ...]

    @property
    def waits(self) -> bool:
        """For the forwards of its warm-up, and for the first I."""
        return True

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """Everywhere."""
        return [(chunk, j) for chunk in range(placement.chunks) for j in range(microbatches)]

    def start(self, stage: int, placement: Placement, microbatches: int) -> int:
        """Forwards that are still to come first; -1 once an I has run."""
        return min(self.warm_ups[stage], microbatches)

    def choose(self, state: int, ready: HintView) -> tuple[Task, int] | None:
        """By what has run."""
        if state > 0:
            task = ready.first(Direction.FORWARD)
            return None if task is None else (task, state - 1)
        for direction in AFTER_WARM_UP if state < 0 else AFTER_WARM_UP[:1]:
            if (task := ready.first(direction)) is not None:
                return task, -1
        return None


def warm_ups(forward: Sequence[float], link: Sequence[float], limit: int) -> list[tuple[int, ...]]:
    """How many forwards each stage begins with: by the rule, or in two ways if they are more than the limit.

    Args:
        forward: what one takes, by stage (s).
        link: what a message takes, by the stage that it comes from; that of the last stage does not matter.
        limit: most microbatches that a stage may hold.
    """
    delays = [late / takes for takes, late in zip(forward[:-1], link[:-1], strict=True)]
    wanted = [SLACK + math.ceil(delay) for delay in delays]
    by_rule = _counts(wanted)
    if by_rule[0] <= limit:
        return [by_rule]
    slack = [1] * len(wanted)
    left = limit - 1 - len(wanted)
    for i in sorted(range(len(wanted)), key=delays.__getitem__, reverse=True):
        more = max(0, min(left, wanted[i] - 1))
        slack[i] += more
        left -= more
    capped = [tuple(min(count, limit) for count in counts) for counts in (by_rule, _counts(slack))]
    return list(dict.fromkeys(capped))


def _counts(slack: Sequence[int]) -> tuple[int, ...]:
    """Warm-ups, by the slackness of every link."""
    return tuple(1 + sum(slack[i:]) for i in range(len(slack) + 1))


def measured(workload: Workload) -> Workload:
    """What is known of the next step after one that took so long: the means of each stage and link."""

    def means(table: Table) -> Table:
        return tuple((fmean(row),) * len(row) for row in table)

    return replace(
        workload,
        forward=means(workload.forward),
        backward_input=means(workload.backward_input),
        backward_weight=means(workload.backward_weight),
        transfer_forward=means(workload.transfer_forward),
        transfer_backward=means(workload.transfer_backward),
    )


def adapted(known: Workload, limit: int) -> ListedOrder:
    """The order for a step of which so much is known, as `measured` says it."""
    forward, link = ([row[0] for row in table] for table in (known.forward, known.transfer_forward))
    hints = [Slackness(counts) for counts in warm_ups(forward, link, limit)]
    trace = min((_simulated(known, hint, limit) for hint in hints), key=lambda trace: trace.makespan)
    rows = tuple(tuple(trace.order(stage)) for stage in range(known.stages))
    return ListedOrder(trace.placement, known.microbatches, rows)


def _simulated(known: Workload, hint: Slackness, limit: int) -> StepTrace:
    placement = Placement(known.stages)
    rules = StepRules(
        placement=placement,
        microbatches=known.microbatches,
        schedule=hint,
        limit=limit,
        accumulation="arrival",
    )
    return simulate(rules, WorkloadCosts(known, placement))
