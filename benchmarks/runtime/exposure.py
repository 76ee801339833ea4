"""What agreement costs a group: the time in which its device idles only because nobody has decided yet."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rrfp_jax.core.events import Arrived, Chosen
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Input
from rrfp_jax.trace.records import TaskRecord


class MemberStep(NamedTuple):
    """One step of one rank of a group, times in seconds on one clock.

    Attributes:
        records: in order of dispatch.
        known: by place in the order, when the rank knew which task comes there.
    """

    records: Sequence[TaskRecord]
    known: Sequence[float]


def exposures(rules: StepRules, members: Sequence[MemberStep], deciders: Sequence[MemberStep]) -> list[float]:
    """For each place in the order of a stage, the seconds exposed.

    From the moment at which the device is idle and some task can run by what has arrived on every rank, to
    the moment at which every rank knows what to run. A scheduler of the same rules, told the arrivals at the
    moments when they had reached all ranks, says what can run. The device is that of whoever decides: the
    ranks' paced devices are not held together by collectives, as real ones are, and one that was once behind
    would hide the way of all later decisions.

    Args:
        rules: of the step.
        members: of the group, all with the same order.
        deciders: those of them that decide.
    """
    records = members[0].records
    scheduler = StageScheduler(records[0].stage, rules)
    arrived = _arrivals(rules, members)
    first = records[0]
    begun = not rules.placement.needs_arrival(first.stage, first.task)
    idle = max(member.records[0].ready for member in members) if begun else -inf
    found = []
    for place, (_, task, *_) in enumerate(records):
        runnable = idle
        while (waiting := next(iter(arrived), None)) is not None:
            if arrived[waiting] > idle and scheduler.choice() is not None:
                break
            runnable = max(idle, arrived.pop(waiting))
            scheduler.handle(Arrived(waiting))
        known = max(member.known[place] for member in members)
        found.append(max(known - runnable, 0.0))
        if arrived.pop(task.input, None) is not None:  # chosen before it had arrived everywhere
            scheduler.handle(Arrived(task.input))
        scheduler.handle(Chosen(task))
        idle = max(member.records[place].end for member in deciders)
    return found


def _arrivals(rules: StepRules, members: Sequence[MemberStep]) -> dict[Input, float]:
    """When each input from another stage had reached all members, first come first."""
    stage = members[0].records[0].stage
    whole: dict[Input, float] = {}
    for member in members:
        for record in member.records:
            if rules.placement.needs_arrival(stage, record.task):
                whole[record.task.input] = max(whole.get(record.task.input, 0.0), record.ready)
    return dict(sorted(whole.items(), key=lambda item: item[1]))
