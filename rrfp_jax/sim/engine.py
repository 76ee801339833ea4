"""The discrete-event engine: virtual time for the stage schedulers of one step.

All events of an instant are applied before any stage is given room at that instant; then those whose state
has changed are given room, in index order. Times are plain sums: end = start + duration, arrival = end +
transfer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.measure.costs import Costs
from rrfp_jax.core.measure.trace import RECORD, Part, StepTrace
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Task
from rrfp_jax.sim.agenda import Agenda
from rrfp_jax.sim.device import Device, connect
from rrfp_jax.sim.links import NETWORKS, Links


def simulate(
    rules: StepRules,
    costs: Costs,
    *,
    links: Links = "parallel",
    budgets: Sequence[Budget | None] | None = None,
    lead: float = 0.0,
    leads: Mapping[tuple[int, Task], float] | None = None,
) -> StepTrace:
    """One step in virtual time, from 0 on; every stage has a device of its own.

    Args:
        rules: of the step.
        costs: of its tasks and transfers.
        links: how transfers share them.
        budgets: in bytes, per stage.
        lead: a second task is queued on a device up to so many seconds before the running one ends, as the
            runtime's driver does.
        leads: the same by stage and running task, where it is another than `lead`; below 0 the stage chooses
            so long after the end.

    Raises:
        ValueError: a fixed order or a limit that the core refuses, unknown links, a negative lead or one with
            synchronous links, budgets that are not one a stage.
        RuntimeError: stages wait for each other for ever; names which one for what.
    """
    if links not in tuple(NETWORKS):
        raise ValueError(f"links={links!r}: choose one of {', '.join(NETWORKS)}")
    if not lead >= 0:
        raise ValueError(f"lead={lead}: give seconds, at least 0")
    if budgets is not None and len(budgets) != rules.placement.stages:
        raise ValueError(f"{len(budgets)} budgets for {rules.placement.stages} stages: give each stage one")
    if lead and links == "synchronous":
        raise ValueError(f"lead={lead} with synchronous links: nothing is queued while a device may be held")
    with _no_collection():
        return _Simulation(rules, costs.begin(), links, budgets, lead, leads or {}).run()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave Python's cycle collector out: it walks over a growing step's tasks again and again.

    At 10^6 tasks that took up to a fifth of the time. A step makes no garbage before it ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Simulation:
    def __init__(
        self,
        rules: StepRules,
        costs: Costs,
        links: Links,
        budgets: Sequence[Budget | None] | None,
        lead: float,
        leads: Mapping[tuple[int, Task], float],
    ) -> None:
        self._duration = costs.duration
        self._leads = leads
        self._lead, self._depth = lead, 2 if lead else 1
        self._agenda: Agenda[Device] = Agenda()
        self._network = NETWORKS[links](costs, self._agenda, self._arrived, self._wake)
        self._placement = rules.placement
        stages = range(rules.placement.stages)
        self._devices = [Device(stage, rules, budgets[stage] if budgets else None) for stage in stages]
        connect(self._devices, rules)
        self._woken: list[Device] = []  # those whose state has changed at this instant
        self._records = bytearray()

    def run(self) -> StepTrace:
        devices, woken, depth = self._devices, self._woken, self._depth
        for device in devices:
            self._agenda.add(0.0, self._wake, device, None)
        for now in self._agenda:
            if len(woken) > 1:
                woken.sort(key=_stage)
            for device in woken:
                if device.tasks < depth and not device.held:
                    self._offer_room(now, device)
            woken.clear()
        if any(not device.scheduler.finished for device in devices):
            waits = (f"stage {device.stage} waits for {device.scheduler.awaited()}" for device in devices)
            raise RuntimeError(f"the step cannot end: {'; '.join(waits)}")
        busy = {device.stage: device.busy for device in devices}
        end = max(device.free for device in devices)
        return StepTrace(0, self._placement, [Part(0.0, end, busy, bytes(self._records))])

    def _wake(self, now: float, device: Device, what: object = None) -> None:
        if device not in self._woken:
            self._woken.append(device)

    def _offer_room(self, now: float, device: Device) -> None:
        while device.tasks < self._depth and now >= device.room:
            dispatch = device.scheduler.handle(ROOM)
            if dispatch is None:
                return
            self._dispatch(now, device, dispatch.task)

    def _dispatch(self, now: float, device: Device, task: Task) -> None:
        kind, chunk, microbatch = task
        stage, ready = device.stage, device.ready
        start = now if now > device.free else device.free
        duration = self._duration(stage, task)
        end = device.free = start + duration
        device.busy += duration
        device.tasks += 1
        self._records += RECORD.pack(
            stage, kind, chunk, microbatch, 0, ready[kind][chunk][microbatch], now, start, end, 0.0, 0.0
        )
        if kind is FORWARD:
            ready[BACKWARD][chunk][microbatch] = now  # on the last virtual stage; elsewhere it must arrive
        elif kind is INPUT:
            ready[WEIGHT][chunk][microbatch] = now
        lead = self._leads.get((stage, task), self._lead) if self._leads else self._lead
        device.room = end
        if lead:
            device.room = max(now, end - lead)
            self._agenda.add(device.room, self._wake, device, None)
        self._agenda.add(end, self._ended, device, task)

    def _ended(self, now: float, device: Device, task: Task) -> None:
        kind, chunk, microbatch = task
        device.tasks -= 1
        self._wake(now, device)
        if device.waiting:
            for begin in device.waiting:
                begin(now)
            device.waiting.clear()
        route = device.routes[kind][chunk]
        if route is None:
            return
        receiver, arrivals = route
        if receiver is device:
            self._arrived(now, device, arrivals[microbatch])
        else:
            self._network.send(now, device, task, receiver, arrivals[microbatch])

    def _arrived(self, now: float, device: Device, arrival: Arrived) -> None:
        device.scheduler.handle(arrival)
        direction, chunk, microbatch = arrival.input
        device.ready[direction][chunk][microbatch] = now
        self._wake(now, device)


_stage = attrgetter("stage")
