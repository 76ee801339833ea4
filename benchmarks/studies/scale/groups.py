"""Pipelines whose stages are groups of processes, in virtual time: the core decides, messages take time.

Each process has the core's machine of its rank, and does what runtime/run/consensus.py and the driver do:
what it hears it tells the machine when its device has room, which it has earlier,
where it decides, by what nine of
ten messages took in the step before. Devices are in order. Where they are held together, as by collectives, a
task starts once all processes of its group have dispatched it; else, as on paced devices, each for itself.
After each dispatch the driver is at work for a while, and neither hears nor decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from benchmarks.runtime.exposure import MemberStep, exposures
from benchmarks.studies.scale.carriers import Deliver, Processors, VirtualCarrier
from benchmarks.studies.scale.costs import MessageCosts
from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.group import Alone, Answer, Decision, GroupMessage, GroupProtocol, member
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import MOST_QUEUED, StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Direction, Input, Placement, Task
from rrfp_jax.runtime.engine.device import DEEPEST, LEAD_SECONDS
from rrfp_jax.runtime.run.consensus import FIRST_LEAD_SECONDS, LONGEST_LEAD_SECONDS, MEASURED
from rrfp_jax.sim.engine import EventQueue
from rrfp_jax.trace.costs import StepCosts, WorkloadCosts, log_normal
from rrfp_jax.trace.jitter import uniforms
from rrfp_jax.trace.records import TaskRecord

MakeCarrier: TypeAlias = Callable[
    [EventQueue[int], int, MessageCosts, Processors, int, Deliver], VirtualCarrier
]
"""A class of benchmarks/studies/scale/carriers.py."""


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """What runs: `replicas` pipelines of `stages` groups of `tp` processes each, alike but for their tasks.

    Attributes:
        task_seconds: mean of a forward; a backward takes twice as long, as I and W each once.
        limit: most microbatches in flight on a stage.
        skew: every arrival is late by up to so much (s), differently on every process.
        hop: of a tensor from stage to stage (s).
        held: whether a task starts on all processes of a group at once.
    """

    stages: int
    tp: int
    replicas: int = 1
    microbatches: int = 12
    task_seconds: float
    schedule: str = "bfw"
    protocol: GroupProtocol = "leader"
    limit: int = 4
    skew: float = 0.0
    hop: float = 5e-4
    held: bool = True

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.stages * self.replicas

    def rules(self) -> StepRules:
        """Of a step of one pipeline."""
        return StepRules(
            placement=Placement(self.stages),
            microbatches=self.microbatches,
            schedule=by_name(self.schedule),
            limit=self.limit,
        )

    def costs(self, replica: int) -> StepCosts:
        """Of a pipeline's tasks."""
        size = {"sigma": 0.3, "shared": 0.5, "seed": 1 + replica}
        workload = log_normal(self.stages, self.microbatches, forward=self.task_seconds, **size)  # type: ignore[arg-type]
        return WorkloadCosts(workload, Placement(self.stages))


@dataclass(frozen=True, kw_only=True)
class GroupedStep:
    """What a step took (s).

    Attributes:
        seconds: from its beginning to the end of its last task.
        exposed: per group, see benchmarks/runtime/exposure.py.
        tasks: of all groups.
        calls: of the store.
        lead: by how much earlier the first process had room.
    """

    seconds: float
    exposed: Sequence[float]
    tasks: int
    calls: int
    lead: float


def simulate(
    run: Grouped, carrier: MakeCarrier, costs: MessageCosts, seed: int, steps: int
) -> list[GroupedStep]:
    """Some steps, each of which goes by the ways that messages took in those before."""
    ways: list[deque[float]] = [deque(maxlen=MEASURED) for _ in range(run.groups * run.tp)]
    return [_Step(run, carrier, costs, seed, number, ways).run() for number in range(steps)]


class _Process:
    """One process of a group, and what its device has to do."""

    def __init__(self, run: Grouped, number: int, rules: StepRules, lead: float) -> None:
        self.number, self.group, self.member = number, number // run.tp, number % run.tp
        self.stage, self.replica = self.group % run.stages, self.group // run.stages
        self.scheduler = StageScheduler(self.stage, rules)
        self.machine: Any = member(self.scheduler, self.member, run.tp, run.protocol)
        decides = not isinstance(self.machine, Alone) and (run.protocol == "unanimous" or not self.member)
        self.lead = lead if decides else 0.0
        self.most = DEEPEST if self.lead else MOST_QUEUED
        self.heard: deque[GroupMessage] = deque()
        self.running: deque[tuple[float, float]] = deque()  # dispatched, seconds
        self.free = 0.0  # since when its device is, unless it runs something
        self.busy = 0.0  # until when its driver is at work
        self.ready: dict[Task, float] = {}
        self.known: dict[int, float] = {}
        self.order: list[tuple[Task, float]] = []  # and when it was dispatched
        self.spans: list[tuple[float, float]] = []  # of those that have ended or are running

    def room_at(self, now: float) -> float:
        """See `DeviceQueue.room_at`; durations are known."""
        if not self.running:
            return now
        if len(self.running) >= self.most:
            return inf
        end = max(self.running[0][0], self.free) + sum(seconds for _, seconds in self.running)
        return end - LEAD_SECONDS - self.lead

    def records(self) -> MemberStep:
        """What it did."""
        pairs = zip(self.order, self.spans, strict=True)
        records = [
            TaskRecord(self.stage, task, 0, self.ready.get(task, 0.0), dispatched, *span)
            for (task, dispatched), span in pairs
        ]
        known = [self.known.get(at, dispatched) for at, (_, dispatched) in enumerate(self.order)]
        return MemberStep(records, known)


class _Step:
    def __init__(
        self,
        run: Grouped,
        make: MakeCarrier,
        costs: MessageCosts,
        seed: int,
        number: int,
        ways: Sequence[deque[float]],
    ) -> None:
        self._run, self._number, self._ways, self._work = run, number, ways, costs.driver
        self._rules = run.rules()
        self._durations = [run.costs(replica).duration for replica in range(run.replicas)]
        self._agenda: EventQueue[int] = EventQueue()
        self._processors = Processors(costs.servers)
        self._shared = self._processors if costs.shared else None
        seed += number << 32
        self._carrier = make(self._agenda, run.tp, costs, self._processors, seed, self._deliver)
        self._processes = [_Process(run, n, self._rules, self._lead(n)) for n in range(run.groups * run.tp)]
        self._woken: dict[int, None] = {}

    def run(self) -> GroupedStep:
        processes, run = self._processes, self._run
        for process in processes:
            self._agenda.add(0.0, self._wake, process.number, None)
        for now in self._agenda:
            woken, self._woken = self._woken, {}
            for number in woken:
                self._offer_room(now, processes[number])
        for process in processes:
            assert process.scheduler.finished, f"process {process.number} waits: {process.machine.awaited()}"
        exposed = []
        for group in range(run.groups):
            members = [process.records() for process in processes[group * run.tp : (group + 1) * run.tp]]
            deciders = members[:1] if run.protocol == "leader" else members
            exposed.append(sum(exposures(self._rules, members, deciders)))
        return GroupedStep(
            seconds=max(process.free for process in processes),
            exposed=exposed,
            tasks=sum(process.scheduler.tasks for process in processes) // run.tp,
            calls=self._carrier.calls,
            lead=processes[0].lead,
        )

    def _lead(self, number: int) -> float:
        """As `Agreement.settle` has it."""
        first = number - number % self._run.tp
        found = [sorted(self._ways[n]) for n in range(first, first + self._run.tp) if n != number]
        ways = [own[len(own) * 9 // 10] for own in found if own]
        return min(max(ways, default=FIRST_LEAD_SECONDS), LONGEST_LEAD_SECONDS)

    def _wake(self, now: float, number: int, what: object) -> None:
        self._woken[number] = None

    def _deliver(self, now: float, number: int, sent: tuple[float, GroupMessage]) -> None:
        at, message = sent
        process = self._processes[number]
        heard = max(now, process.busy)
        self._ways[number].append(heard - at)
        if isinstance(message, Decision):
            process.known[message.position] = heard
        process.heard.append(message)
        self._woken[number] = None

    def _offer_room(self, now: float, process: _Process) -> None:
        while process.busy <= now and process.room_at(now) <= now and self._decide(now, process):
            pass
        if now < (at := max(process.room_at(now), process.busy)) < inf:
            self._agenda.add(at, self._wake, process.number, None)

    def _decide(self, now: float, process: _Process) -> bool:
        """As `Agreement.handle` does on `Room`; whether something was dispatched."""
        while process.heard:
            if self._follow(now, process, process.machine.handle(process.heard.popleft())):
                return True
        return self._follow(now, process, process.machine.handle(ROOM))

    def _follow(self, now: float, process: _Process, answer: Answer) -> bool:
        dispatch, message = answer
        if message is not None:
            self._carrier.post(now, process.number, message)
        if dispatch is not None:
            self._dispatch(now, process, dispatch.task)
        return dispatch is not None

    def _dispatch(self, now: float, process: _Process, task: Task) -> None:
        process.busy = self._shared.serve(now, self._work) if self._shared else now + self._work
        process.running.append((now, self._durations[process.replica](process.stage, task)))
        process.order.append((task, now))
        if task.kind is FORWARD:  # on the last stage; elsewhere the gradient arrives
            backward = process.scheduler.task_for(Direction.BACKWARD, task.chunk, task.microbatch)
            process.ready.setdefault(backward, now)
        elif task.kind is INPUT:
            process.ready[task._replace(kind=WEIGHT)] = now
        self._start(now, process)

    def _start(self, now: float, process: _Process) -> None:
        """Start what can be started on the process's device, or on all that are held together."""
        run, at = self._run, len(process.spans)
        first = process.group * run.tp
        held = self._processes[first : first + run.tp] if run.held else [process]
        if any(len(each.order) <= at or len(each.running) > len(each.order) - at for each in held):
            return  # somebody has not dispatched it, or has not ended the one before
        task, _ = process.order[at]
        end = now + process.running[0][1]
        for each in held:
            each.spans.append((now, end))
            self._agenda.add(end, self._ended, each.number, task)

    def _ended(self, now: float, number: int, task: Task) -> None:
        process, run = self._processes[number], self._run
        process.running.popleft()
        process.free = now
        self._woken[number] = None
        destination = self._rules.placement.destination(process.stage, task)
        if destination is not None:
            stage, arrival = destination
            to = number + (stage - process.stage) * run.tp
            late = run.skew * uniforms(to << 32, self._number, stage, arrival)[0]
            self._agenda.add(now + run.hop + late, self._arrived, to, arrival)
        if len(process.order) > len(process.spans):
            self._start(now, process)

    def _arrived(self, now: float, number: int, arrived: Input) -> None:
        process = self._processes[number]
        process.ready[process.scheduler.task_for(*arrived)] = now
        self._follow(now, process, process.machine.handle(Arrived(arrived)))
        self._woken[number] = None
