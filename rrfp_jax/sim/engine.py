"""The discrete-event engine: virtual time for the stage schedulers of one step.

All events of an instant are applied before any stage is offered room at that instant; stages are offered room
in index order. Times are plain sums: end = start + duration, arrival = end + transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.rules import Budget, StepRules
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Task
from rrfp_jax.core.trace import Part, StepTrace, TaskRecord
from rrfp_jax.sim.costs import Costs
from rrfp_jax.sim.links import Links


def simulate(
    rules: StepRules,
    costs: Costs,
    *,
    links: Links = "parallel",
    budgets: Sequence[Budget | None] | None = None,
    lead: float = 0.0,
) -> StepTrace:
    """One step in virtual time, from 0 on; every stage has a device of its own.

    Args:
        rules: of the step.
        costs: of its tasks and transfers.
        links: how transfers share them.
        budgets: in bytes, per stage.
        lead: a second task is queued on a device up to so many seconds before the running one ends, as the
            runtime's driver does.

    Raises:
        ValueError: a fixed order or a limit that the core refuses.
        RuntimeError: stages wait for each other for ever; names which one for what.
    """
    return _Simulation(rules, costs.begin(), links, budgets, lead).run()


class _Simulation:
    def __init__(
        self,
        rules: StepRules,
        costs: Costs,
        links: Links,
        budgets: Sequence[Budget | None] | None,
        lead: float,
    ) -> None:
        if links != "parallel":
            raise NotImplementedError(links)
        stages = rules.placement.stages
        self._rules, self._costs, self._lead = rules, costs, lead
        self._schedulers = [
            StageScheduler(stage, rules, budgets[stage] if budgets else None) for stage in range(stages)
        ]
        self._free = [0.0] * stages  # when each device ends what it has
        self._queued = [0] * stages  # tasks that have not ended
        self._ready: list[dict[Task, float]] = [{} for _ in range(stages)]
        self._records: list[TaskRecord] = []
        self._events: list[tuple[float, int, int, Task | None, bool]] = []  # at, stage, number, arrived, end

    def run(self) -> StepTrace:
        stages = range(self._rules.placement.stages)
        for stage in stages:
            self._offer_room(stage, 0.0)
        while self._events:
            now, touched = self._events[0][0], set()
            while self._events and self._events[0][0] == now:
                _, stage, _, arrived, ended = heapq.heappop(self._events)
                touched.add(stage)
                self._queued[stage] -= ended
                if arrived is not None:
                    scheduler = self._schedulers[stage]
                    scheduler.handle(Arrived(arrived))
                    self._ready[stage][scheduler.named(arrived)] = now
            for stage in sorted(touched):
                self._offer_room(stage, now)
        if unfinished := [s for s in self._schedulers if not s.finished]:
            waits = "; ".join(f"stage {s.stage} waits for {s.awaited()}" for s in unfinished)
            raise RuntimeError(f"the step cannot end: {waits}")
        return StepTrace(0, self._rules.placement, [Part.of(self._records)])

    def _offer_room(self, stage: int, now: float) -> None:
        while self._queued[stage] == 0 or (
            self._queued[stage] == 1 and now >= self._free[stage] - self._lead and self._lead
        ):
            instructions = self._schedulers[stage].handle(ROOM)
            if not instructions:
                return
            self._dispatch(stage, instructions[0].task, now)  # type: ignore[union-attr]

    def _dispatch(self, stage: int, task: Task, now: float) -> None:
        start = max(now, self._free[stage])
        end = self._free[stage] = start + self._costs.duration(stage, task)
        ready = self._ready[stage]
        self._records.append(TaskRecord(stage, task, 0, ready.pop(task, 0.0), now, start, end))
        self._queued[stage] += 1
        if self._lead:
            self._push(max(now, end - self._lead), stage, None, False)
        self._push(end, stage, None, True)
        destination = self._rules.placement.destination(stage, task)
        if destination is not None:
            self._push(end + self._costs.transfer(stage, task), *destination, False)
        elif task.kind is FORWARD:
            own = self._schedulers[stage].named(Task(BACKWARD, task.chunk, task.microbatch))
            ready[own] = now
        if task.kind is INPUT:
            ready[Task(WEIGHT, task.chunk, task.microbatch)] = now

    def _push(self, at: float, stage: int, arrived: Task | None, ended: bool) -> None:
        heapq.heappush(self._events, (at, stage, len(self._records), arrived, ended))
