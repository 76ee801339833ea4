"""The discrete-event engine: virtual time for the stage schedulers of one step.

All events of an instant are applied before any stage is given room at that instant; then those whose state
has changed are given room, in index order. Times are plain sums: end = start + duration, arrival = end +
transfer.

How an output gets from the device that has computed it to the stage that needs it.

    parallel      each transfer begins when its task has ended, beside all others
    serial        each directed link carries one transfer after another, in the order in which tasks end
    synchronous   send and receive by rendezvous, as in classic 1F1B implementations

In the synchronous model a transfer begins when its task has ended *and* the receiver's device is not
computing. Until it is over, neither device computes. So a stage that has an output to pass on waits until its
neighbour has finished its task. A neighbour that has finished takes what is offered before it computes on. A
device that does not compute takes any number of transfers at once, whatever its schedule waits for. That is
kinder than blocking calls posted in a fixed order: nobody deadlocks, and two stages can exchange tensors.
Compare one schedule under "synchronous" and "parallel" to see the share of communication in a gain; compare
two schedules under "parallel" to see that of order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from rrfp_jax.core.events import ROOM, Arrived, Dispatch
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, Budgets, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Direction, Kind, Task
from rrfp_jax.garbage import no_collections
from rrfp_jax.trace.costs import StepCosts
from rrfp_jax.trace.records import RECORD, Part, StepTrace

Whom = TypeVar("Whom")

Happening: TypeAlias = Callable[[float, Whom, Any], None]
"""What is called with the time, whom it concerns, and what was entered with it."""


class EventQueue(Generic[Whom]):
    """A heap of events, which concern devices, or whatever else there is several of."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening[Whom], Whom, Any]] = []
        self._entries = 0

    def add(self, at: float, happens: Happening[Whom], whom: Whom, what: Any) -> None:
        """Have `happens(at, whom, what)` called."""
        self._entries += 1
        heappush(self._heap, (at, self._entries, happens, whom, what))

    def __iter__(self) -> Iterator[float]:
        """Go from instant to instant, when all of its events have happened; later ones make it come again."""
        heap = self._heap
        while heap:
            now, _, happens, whom, what = heappop(heap)
            happens(now, whom, what)
            if not heap or heap[0][0] != now:
                yield now


class Device:
    """What one stage's device does; times in seconds."""

    __slots__ = ("busy", "free", "held", "ready", "room", "routes", "scheduler", "stage", "tasks", "waiting")

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None) -> None:
        self.stage = stage
        self.scheduler = StageScheduler(stage, rules, budget)
        self.tasks = self.held = 0  # tasks that have not ended, transfers that keep it from computing
        self.free = self.busy = 0.0  # when the last of its tasks ends, and how long it has computed by then
        self.room = 0.0  # from when on another task may be queued behind the running one
        self.waiting: list[Callable[[float], None]] = []  # for the end of its task, if links are synchronous
        chunks, microbatches = rules.placement.chunks, rules.microbatches
        by_direction = {way: [[0.0] * microbatches for _ in range(chunks)] for way in Direction}
        # When each task became ready, `[kind or direction][chunk][microbatch]`.
        self.ready = [by_direction[row.direction] for row in KINDS]
        # Where outputs go, `[kind][chunk]`: the device, and the event there, by microbatch.
        self.routes: Mapping[Kind, Sequence[tuple[Device, Sequence[Arrived]] | None]] = {}


def connect(devices: Sequence[Device], rules: StepRules) -> None:
    """Give every device its routes."""
    placement, chunks = rules.placement, range(rules.placement.chunks)
    arrivals = {
        kind.direction: [[Arrived(task.input) for task in row] for row in rules.names[kind]]
        for kind in (FORWARD, BACKWARD)
    }

    def route(stage: int, task: Task) -> tuple[Device, Sequence[Arrived]] | None:
        destination = placement.destination(stage, task)
        if destination is None:
            return None
        to, (direction, chunk, _) = destination
        return devices[to], arrivals[direction][chunk]

    for device in devices:
        device.routes = {kind: [route(device.stage, Task(kind, c, 0)) for c in chunks] for kind in Kind}


Links: TypeAlias = Literal["parallel", "serial", "synchronous"]

Leads: TypeAlias = Mapping[tuple[int, Task], float]
"""By stage and task, how long before its end another one is queued (s)."""

Receive: TypeAlias = Callable[[float, Device, Arrived], None]
"""What happens when an output has arrived at a device at a time."""

Freed: TypeAlias = Callable[[float, Device], None]
"""What happens when a transfer no longer keeps a device from computing."""


class Parallel:
    """Carries outputs, every one for itself; all times in seconds."""

    def __init__(self, costs: StepCosts, agenda: EventQueue[Device], receive: Receive, freed: Freed) -> None:
        self._transfer, self._occupancy = costs.transfer, costs.occupancy
        self._add, self._receive, self._freed = agenda.add, receive, freed
        self._free: dict[tuple[int, int], float] = defaultdict(float)  # when each link is, if they are serial

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        """`task` has ended on a device, and another one needs its output."""
        arrives = now + self._transfer(sender.stage, task)
        if arrives == now:
            self._receive(now, receiver, arrival)
        else:
            self._add(arrives, self._receive, receiver, arrival)


class Serial(Parallel):
    """One transfer after another on each directed link."""

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        link = sender.stage, receiver.stage
        begins = max(now, self._free[link])
        self._free[link] = begins + self._occupancy(sender.stage, task)
        self._add(begins + self._transfer(sender.stage, task), self._receive, receiver, arrival)


class Synchronous(Parallel):
    """Rendezvous of two devices that do not compute."""

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:

        def begin(now: float) -> None:
            receiver.held += 1
            self._add(now + self._transfer(sender.stage, task), end, receiver, arrival)

        def end(now: float, receiver: Device, arrival: Arrived) -> None:
            for device in (sender, receiver):
                device.held -= 1
                self._freed(now, device)
            self._receive(now, receiver, arrival)

        sender.held += 1
        if receiver.tasks:
            receiver.waiting.append(begin)
        else:
            begin(now)


NETWORKS: dict[str, type[Parallel]] = {"parallel": Parallel, "serial": Serial, "synchronous": Synchronous}


def simulate(
    rules: StepRules,
    costs: StepCosts,
    *,
    links: Links = "parallel",
    budgets: Budgets = None,
    lead: float = 0.0,
    leads: Leads | None = None,
) -> StepTrace:
    """One step in virtual time, from 0 on; every stage has a device of its own, and a budget in bytes.

    Args:
        links: how transfers share them.
        lead: a second task is queued on a device up to so many seconds before the running one ends, as the
            runtime's driver does; none with synchronous links, which may hold the device.
        leads: the same by stage and running task, where it is another than `lead`; below 0 the stage chooses
            so long after the end.

    Raises:
        ValueError: a fixed order or a limit that the core refuses, or unknown links.
        RuntimeError: stages wait for each other for ever; names which one for what.
    """
    if links not in tuple(NETWORKS):
        raise ValueError(f"links={links!r}: choose one of {', '.join(NETWORKS)}")
    with no_collections():  # in growing steps they took up to a fifth of the time
        return _Simulation(rules, costs, links, budgets, lead, leads or {}).run()


class _Simulation:
    def __init__(
        self, rules: StepRules, costs: StepCosts, links: Links, budgets: Budgets, lead: float, leads: Leads
    ) -> None:
        self._duration, self._leads, self._lead = costs.duration, leads, lead
        self._agenda: EventQueue[Device] = EventQueue()
        self._network = NETWORKS[links](costs, self._agenda, self._arrived, self._wake)
        self._placement = rules.placement
        stages = range(rules.placement.stages)
        self._devices = [Device(stage, rules, budgets[stage] if budgets else None) for stage in stages]
        connect(self._devices, rules)
        self._woken: list[Device] = []  # those whose state has changed at this instant
        self._records = bytearray()

    def run(self) -> StepTrace:
        devices, woken, depth = self._devices, self._woken, 2 if self._lead else 1
        for device in devices:
            self._agenda.add(0.0, self._wake, device, None)
        for now in self._agenda:
            if len(woken) > 1:
                woken.sort(key=attrgetter("stage"))
            for device in woken:
                while device.tasks < depth and not device.held and now >= device.room:
                    if (dispatch := device.scheduler.handle(ROOM)) is None:
                        break
                    self._dispatch(now, device, dispatch)
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

    def _dispatch(self, now: float, device: Device, dispatch: Dispatch) -> None:
        task, _, became_ready = dispatch
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
        for later in became_ready:
            ready[later[0]][chunk][microbatch] = now
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
