"""The loop of one step: it feeds the core, dispatches what the core decides, and reads the clock for it.

Three moves are repeated until every task of this process's stages has ended: collect what has ended and
arrived, fill the devices that have room, sleep. The threads that watch devices, and messages, wake it. So a
ready task is picked up within about 100 us, and an idle driver costs next to nothing.

`Driver` is what steps run on in this process, from the first step to the last. It opens the devices' queues
and the transport for each step, and hands them to the loop.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from math import inf
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import jax

from rrfp_jax.core.events import ROOM, Arrived, Dispatch, Room, WaitCause
from rrfp_jax.core.foresight import DEEPEST, Dispatching, expected_end, rooms
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import MOST_QUEUED, Budget, StepRules
from rrfp_jax.core.tasks import FORWARD, Direction, Input, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.garbage import no_collections
from rrfp_jax.runtime.engine.device import DeviceQueue, Running, precise_timers
from rrfp_jax.runtime.engine.pacing import ArrivalDelays
from rrfp_jax.runtime.mesh.topology import taking_turns
from rrfp_jax.runtime.programs.stage_programs import AwaitedInputs, Tokens
from rrfp_jax.runtime.run.consensus import Agreement
from rrfp_jax.runtime.run.recorder import ARRIVED, COMING, DELIVERED, OFFERED, PRODUCED
from rrfp_jax.runtime.run.signals import interrupts_held
from rrfp_jax.runtime.run.waits import (
    SHORTEST_PAUSE,
    AnyAwaited,
    ForDevices,
    ForProgram,
    ForTask,
    ForTransfer,
    LimitedWait,
)
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import Meter
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Devices,
    Key,
    LocalTransport,
    Messages,
    Place,
    Shards,
    TransferObserver,
    Transport,
    copies_allowed,
    soonest_poll,
)
from rrfp_jax.trace.records import TaskRecord

Arrays: TypeAlias = Sequence[jax.Array]


class StageStep(Protocol):
    """A stage's part in one step, as the driver drives it."""

    phase: str
    buckets: Sequence[int]  # number of each microbatch's bucket in this step
    shapes: Sequence[int]  # its number among those of all steps
    meter: Meter  # told by the driver

    def receive(self, task: Task, arrays: Arrays) -> None:
        """File the input of a task that has arrived: what this process's devices have of it."""

    def run(self, task: Task, in_turn: bool) -> tuple[Arrays, Any]:
        """Dispatch a task; gradients that it computes are added if it is their turn, else parked.

        Returns:
            This process's shards of what to send to another virtual stage (see `StageMesh.shards`), and an
            array that is ready when the task has ended.
        """

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """Add the gradients of a chunk that have been parked for a microbatch."""

    def finish(self) -> None:
        """All tasks have been dispatched, and all gradients added: dispatch what follows from them alone."""


UPDATE = "the last update"


FIRST, EVERY = 2, 512
"""Rounds of tasks before which all garbage is collected: the first, and how many from one to the next."""


def collect_together(round: int, ranks: int) -> None:
    """Collect all garbage if this is a round for it, on all ranks at once; alone it is left to Python."""
    if ranks > 1 and round % EVERY == FIRST and gc.isenabled():
        gc.collect()


class EventWakeup:
    """Wakes one sleeper of a process that is alone. Among several the mailbox does, as messages ring it."""

    def __init__(self) -> None:
        self._bell = threading.Lock()  # free while it rings: one call where an Event takes twenty
        self._bell.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def sleep(self, seconds: float) -> None:
        self._bell.acquire(timeout=seconds)


class Driver:
    """Runs steps on the stages of this process. Its threads live to `close`, or to a step broken off.

    Args:
        devices: of this process's stages, by stage replica; programs run on all at once.
        world: the processes of the run.
        remote: carries messages to other processes; None if there are none.
        stall_seconds: without any progress for so long, a step is given up and what it waited for is named.
        queue: makes the queue of a device, from its name and what wakes the driver.
        scheduler: makes a stage's scheduler for a step; see also tests/support/interleave.py.
        agreement: with the other processes of this process's stage, if there are any.
        delays: hold arrivals, for experiments.
        dispatch: whether tasks of inputs that are foreseen are dispatched (core/foresight.py), where devices
            and arrivals are as they are, and within this process.
        name: of a stage, for messages.
    """

    def __init__(
        self,
        devices: Devices,
        world: World,
        remote: Transport | None = None,
        stall_seconds: float = 300.0,
        queue: Callable[[str, Callable[[], None]], DeviceQueue] = DeviceQueue,
        scheduler: Callable[[int, StepRules, Budget | None], StageScheduler] = StageScheduler,
        agreement: Agreement | None = None,
        delays: ArrivalDelays | None = None,
        dispatch: Dispatching = "ready",
        name: Callable[[int], str] = "stage {}".format,
    ) -> None:
        self.scheduler, self.agreement, self.delays, self.dispatch = scheduler, agreement, delays, dispatch
        self.copies: dict[tuple[int, Direction], float] = {}  # how long inputs take to a stage, running means
        self.local = LocalTransport(devices, waits=delays is not None)  # a link's delay begins then
        self.remote = remote
        self.devices, self._name = devices, name
        self._world, self._steps = world, 0
        self._stall_seconds = stall_seconds
        self._bell = world.mailbox or EventWakeup()
        firsts = taking_turns(devices)
        distinct = list(dict.fromkeys(firsts.values()))
        self._queues = [queue(str(device), self._bell.ring) for device in distinct]
        # Later stages first where several share a device: what is furthest along frees memory soonest.
        self._sharing = [[s for s in sorted(firsts, reverse=True) if firsts[s] == d] for d in distinct]

    def run(
        self,
        rules: StepRules,
        step: int,
        parts: Mapping[int, StageStep],
        budgets: Sequence[Budget | None] = (),
        updated: float | None = None,
        params: Mapping[int, Arrays] = MappingProxyType({}),
        early: int | None = None,
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> list[TaskRecord]:
        """Run one step to the end of this process's parts of it, given by stage replica.

        `budgets` are in bytes, of all stage replicas; empty for none. The last update, which may still run,
        was dispatched at `updated` (s; None if there was none since the parameters were made) and gives
        `params`, by stage replica; tasks are queued behind it, and it is neither idle time nor compute. Of
        each stage so many tasks may be dispatched before their inputs have come, `early`; None for any
        number. Of `meanwhile` the first is called once all devices have something to do, the last once all
        tasks are dispatched and no other process waits for one, unless all have ended by then.

        Raises:
            TrainingError: a program or a transfer failed, a process is gone, or nothing moved for
                `stall_seconds`.
        """
        round = self._world.next_round()
        self._steps += 1  # rounds are also counted by whoever shares a stage
        if not all(queue.as_it_is for queue in self._queues):
            updated = None
        if updated is None:
            self._world.await_ready(UPDATE, [*chain.from_iterable(params.values())])
        collect_together(self._steps, self._world.size)
        with interrupts_held() as interrupted, precise_timers(), no_collections(), ExitStack() as open_queues:
            for queue in self._queues:
                open_queues.enter_context(queue)
            agreed = self.agreement
            if agreed is not None and not agreed.alone and rules.hint is not None:  # else nothing is said
                open_queues.enter_context(agreed.carrier)
            open_queues.enter_context(copies_allowed())
            under_way = StepExecution(self, rules, step, round, parts, budgets, early)
            if updated is not None:
                under_way.follows(updated, params)
            open_queues.enter_context(self._carrying(round, under_way))
            return under_way.run(interrupted, [*meanwhile])

    @contextmanager
    def _carrying(self, round: int, observer: TransferObserver = UNOBSERVED) -> Iterator[None]:
        """Inside, messages of a round are carried."""
        broken = True
        try:
            for transport in self.transports:
                transport.begin(round, observer)
            yield
            broken = False
        finally:
            for transport in self.transports:
                transport.finish(broken=broken)

    @property
    def transports(self) -> Sequence[Transport]:
        """What carries messages."""
        return (self.local,) if self.remote is None else (self.local, self.remote)

    def reserve(self, messages: Messages) -> Mapping[int, int]:
        return {} if self.remote is None else self.remote.reserve(messages)

    def exchange(
        self, what: str, sends: Mapping[Place, Shards], expected: Collection[Place]
    ) -> dict[Place, Shards]:
        """Send single arrays to stages, outside of steps, and wait until all have arrived; all together.

        Raises:
            PeerLost: a process of the run is gone.
            TrainingError: a transfer failed, or nothing came for `stall_seconds`.
        """
        world, limit, transports = self._world, self._stall_seconds, self.transports
        round, arrived = world.next_round(), dict[Place, Shards]()

        def missing() -> tuple[str, ...]:
            stages = {place[0] for place in expected if place not in arrived}
            return tuple(map(self._name, sorted(stages)))

        def carrier(key: Key) -> Transport:
            return self.local if key.stage in self.devices or self.remote is None else self.remote

        waits = world.waits_for(lambda: [ForTransfer(what=what, stages=missing())], limit)
        with copies_allowed(), waits as wait, interrupts_held() as interrupted, self._carrying(round):
            keyed = [(Key(round, s, Input(Direction.WEIGHT, 0, n)), own) for (s, n), own in sends.items()]
            for key, shards in keyed:
                carrier(key).offer(key, shards)
            for key, shards in keyed:
                world.await_ready(f"{what} to be computed", shards, limit)
                carrier(key).produced(key, perf_counter())
            while missing():
                if interrupted():
                    raise KeyboardInterrupt
                if arrivals := [one for transport in transports for one in transport.poll()]:
                    arrived |= {(key.stage, key.input.microbatch): shards for key, shards, *_ in arrivals}
                    wait.progressed()
                else:
                    wait.check()
                    self._bell.sleep(wait.shortened(soonest_poll(transports)))
        # A process that went on at once could end, and with it what others are still pulling from it.
        world.gather(f"{what} to have arrived", None, limit)
        return arrived

    def close(self) -> None:
        """No step follows; returns at once, and does nothing the second time."""
        for queue in self._queues:
            queue.close()
        for transport in self.transports:
            transport.close()
        if self.agreement is not None:
            self.agreement.carrier.close()

    def gather(self, what: str, value: Any, records: Sequence[TaskRecord], step: int) -> list[Any]:
        """What every process says of a step that has run, by rank; stages of several compare their orders.

        Raises:
            TrainingError: see `World.gather`; or processes of a stage have dispatched different tasks.
        """
        account = self.agreement.account(records) if self.agreement is not None else None
        gathered = self._world.gather(what, [value, account])
        if self.agreement is not None:
            self.agreement.settle([account for _, account in gathered], step)
        return [value for value, _ in gathered]


SHORT_SLEEP_SECONDS = 1e-3
"""After so short a sleep the driver looks at its devices itself; before longer ones it has them watched."""


class StepExecution(TransferObserver):
    """One step under way on a driver; observes what its messages take."""

    def __init__(
        self,
        driver: Driver,
        rules: StepRules,
        step: int,
        round: int,
        parts: Mapping[int, StageStep],
        budgets: Sequence[Budget | None],
        early: int | None,
    ) -> None:
        self._driver, self._queues, self._name = driver, driver._queues, driver._name
        self._local, self._remote = driver.local, driver.remote or driver.local
        self._transports, self._delays = driver.transports, driver.delays
        self._recorder = driver._world.recorder
        self._rules, self._step, self._round, self._parts, self._early = rules, step, round, parts, early
        self._stages = rules.placement.stages
        self._schedulers = {
            s: driver.scheduler(s % self._stages, rules, budgets[s] if budgets else None) for s in parts
        }
        self._total = sum(scheduler.tasks for scheduler in self._schedulers.values())
        self._ready: dict[int, dict[Task, float]] = {s: {} for s in parts}  # since when
        self._machines: dict[int, StageScheduler | Agreement] = {**self._schedulers}
        self._recorder.begin_round(round, step, rules, list(parts))
        shared = driver.agreement is not None and not driver.agreement.alone
        self._agreement = driver.agreement if shared else None
        if self._agreement is not None:
            ((stage, scheduler),) = self._schedulers.items()
            self._agreement.begin(round, scheduler)
            self._machines[stage] = self._agreement
            most = MOST_QUEUED if budgets and budgets[stage] is not None else DEEPEST
            self._queues[0].decide_ahead(self._agreement.lead, most)
        if self._delays is not None:
            self._delays.clear()
        self._began = dict.fromkeys(parts, perf_counter())
        self._wait: LimitedWait  # of `run`
        self._late: dict[tuple[int, Task], float] = {}  # of that, how much was injected; by stage and task
        real = all(queue.as_it_is for queue in self._queues)
        may = real and len(self._queues) > 1 and not (shared or self._delays or early == 0)
        self._foresees = driver.dispatch == "foreseen" and may
        self._coming: dict[int, dict[Input, tuple[Running, Arrays]]] = {s: {} for s in parts}
        self._taken = set[Key]()  # inputs of tasks that have been dispatched before they came
        if self._foresees:
            deepest = DEEPEST if early is None else MOST_QUEUED
            for queue, stages in zip(self._queues, driver._sharing, strict=True):
                queue.foresee(deepest, ordered=rules.hint is None and len(stages) == 1)
        # When a stage is to be asked what to run: -inf for at once, as something has come; else from then on,
        # but only with an input that is foreseen.
        self._ask_at = dict.fromkeys(parts, -inf)
        self._held: dict[int, WaitCause] = {}  # what it waited for when last asked, since its last dispatch
        self._records: list[TaskRecord] = []

    def follows(self, at: float, params: Mapping[int, Arrays]) -> None:
        """Have tasks run behind the update that was dispatched then, and gives these parameters."""
        for queue, stages in zip(self._queues, self._driver._sharing, strict=True):
            token = Tokens(chain.from_iterable(map(params.__getitem__, stages)))
            first, cost = Task(FORWARD, 0, 0), (UPDATE, stages[0])
            update = Running(self._step, stages[0], first, 0, cost, token, at, at, is_update=True)
            if not update.has_ended():  # else nobody knows how long it took
                queue.submit(update)
            elif update.error is not None:
                raise self._failed(update.error, None, stages[0]) from update.error

    def run(self, interrupted: Callable[[], bool], errands: list[Callable[[], None]]) -> list[TaskRecord]:
        """To the end of this process's part; `interrupted` tells whether to break it off."""
        try:
            with self._driver._world.waits_for(self._waiting, self._driver._stall_seconds) as self._wait:
                while not self._is_over():
                    if interrupted():
                        raise KeyboardInterrupt
                    moved, filled = self._collect(), self._fill()
                    moved |= filled
                    while filled and self._foresees:  # what one device is given, another may foresee
                        filled = self._fill()
                    if moved:
                        self._wait.progressed()
                    elif self._wait.reached():
                        raise TrainingError(self._stalled())
                    if errands and (len(errands) > 1 or self._is_at_leisure()):
                        errands.pop(0)()
                    elif not self._is_over():
                        self._sleep()
        finally:
            del self._wait  # it knows this step: both, and all arrays, would stay until garbage is collected
        return self._records

    def _is_at_leisure(self) -> bool:
        """Whether every task here has been dispatched, and no other process waits for one that still runs."""
        if not all(scheduler.finished for scheduler in self._schedulers.values()):
            return False
        flights = (running for queue in self._queues for running in queue.flights)
        return all(own.sends is None or own.sends.stage in self._parts for own in flights)

    def _is_over(self) -> bool:
        """Whether all has run, and come: an input may be seen to come after its task has been seen to end."""
        return len(self._records) == self._total and not self._taken

    def _collect(self) -> bool:
        """Note the programs that have ended and the inputs that have arrived."""
        moved = False
        for queue, stages in zip(self._queues, self._driver._sharing, strict=True):
            for running in queue.ended():
                moved = True
                self._note_end(running, stages)
        for queue in self._queues if moved else ():  # which may wait for what has been computed
            queue.room = -inf
        arrivals = [arrival for transport in self._transports for arrival in transport.poll()]
        if self._delays is not None:
            arrivals = self._delays.hold(arrivals)
        for key, arrays, produced, late in arrivals:
            moved = True
            self._recorder.got(key.stage, key.input, ARRIVED)
            if self._foresees and self._came(key, produced):
                continue
            self._machines[key.stage].handle(Arrived(key.input))
            task = self._schedulers[key.stage].task_for(*key.input)
            self._parts[key.stage].receive(task, arrays)
            self._ready[key.stage][task] = perf_counter()
            if late:
                self._late[key.stage, task] = late
            self._ask_at[key.stage] = -inf
        if self._agreement is not None and self._agreement.hear():
            self._ask_at = dict.fromkeys(self._ask_at, -inf)
        return moved

    def _note_end(self, running: Running, stages: Sequence[int]) -> None:
        task = None if running.is_update else running.task
        if task is not None:
            self._recorder.ended()
        if running.error is not None:
            raise self._failed(running.error, task, running.stage) from running.error
        if task is None:
            self._began |= dict.fromkeys(stages, running.end)
            return
        if running.sends is not None:
            carrier = self._local if running.sends.stage in self._parts else self._remote
            carrier.produced(running.sends, running.end)
            if running.sends.input in self._coming.get(running.sends.stage, ()):  # now it is sure
                self._ask_at[running.sends.stage] = min(self._ask_at[running.sends.stage], 0.0)
            self._recorder.sent(running.stage, task, PRODUCED)
        late = self._late.pop((running.stage, task), 0.0) if self._late else 0.0
        self._records.append(running.record(late))

    def _came(self, key: Key, produced: float) -> bool:
        """Learn how long an input took; whether it was foreseen, so that its task is dispatched."""
        if produced:
            way, took = (key.stage, key.input.direction), perf_counter() - produced
            self._driver.copies[way] = 0.9 * self._driver.copies.get(way, took) + 0.1 * took
        self._coming[key.stage].pop(key.input, None)
        if found := key in self._taken:
            self._taken.remove(key)
            self._parts[key.stage].meter.came(key.input)
            if self._early is not None:  # one more task may be early
                self._ask_at[key.stage] = min(self._ask_at[key.stage], 0.0)
        return found

    def _rooms(
        self, queue: DeviceQueue, stage: int, stages: Sequence[int], now: float
    ) -> tuple[list[Room], float]:
        """Room on a device, with the inputs that are expected in time; see `rooms`."""
        if not (coming := self._coming[stage]) or self._has_most_early(stage):
            return [ROOM], inf
        if queue.is_ordered:
            following = {task.input for task in self._schedulers[stage].awaited().tasks}
            return [Room(foreseen=following & coming.keys())], inf
        copies = self._driver.copies
        expected = (
            (one, running, copies.get((stage, one.direction), inf)) for one, (running, _) in coming.items()
        )
        others = any(self._schedulers[other].choice() for other in stages if other != stage)
        return rooms(expected, expected_end(queue, now), now, others=others)

    def _has_most_early(self, stage: int) -> bool:
        """Whether the limit on bytes allows no more tasks that run ahead of their inputs."""
        return self._early is not None and sum(key.stage == stage for key in self._taken) >= self._early

    def _fill(self) -> bool:
        """Give every device that has room the best task of its stages."""
        moved = False
        for queue, stages in zip(self._queues, self._driver._sharing, strict=True):
            for stage in stages:  # the first goes first as long as it has anything to run
                while (at := self._ask_at[stage]) <= (now := perf_counter()) and queue.room_at(now) <= now:
                    asked, soonest = self._rooms(queue, stage, stages, now)
                    # If nothing has come since it had nothing, only what is foreseen can change that.
                    asked = [room for room in asked if at == -inf or room.foreseen]
                    dispatches = map(self._machines[stage].handle, asked)
                    if (dispatch := next(filter(None, dispatches), None)) is not None:
                        self._dispatch(queue, stage, dispatch, now)
                        moved, self._ask_at[stage] = True, -inf
                        continue
                    self._ask_at[stage] = soonest
                    if asked:
                        self._held[stage] = self._machines[stage].awaited(named=False).cause
        return moved

    def _dispatch(self, queue: DeviceQueue, stage: int, dispatch: Dispatch, now: float) -> None:
        part, task, of_model = self._parts[stage], dispatch.task, stage % self._stages
        wanted, after = task.input, None
        if (foreseen := self._coming[stage].pop(wanted, None)) is not None:
            after, arrays = foreseen
            part.receive(task, arrays)
            self._taken.add(Key(self._round, stage, wanted))
        # Noted before: a collective out of order may end the process.
        self._recorder.dispatched(self._step, of_model, task)
        try:
            outputs, token = part.run(task, bool(dispatch.additions))
        except Exception as error:
            raise self._failed(error, task, stage) from error
        ready = self._ready[stage].pop(task, self._began[stage])
        bucket = part.buckets[task.microbatch]
        cost = part.phase, stage, task.chunk, task.kind, part.shapes[task.microbatch]
        key = None
        if (destination := self._rules.placement.destination(of_model, task)) is not None:
            key = Key(self._round, stage - of_model + destination[0], destination[1])
        held = self._held.pop(stage, None) if self._held else None
        running = Running(self._step, stage, task, bucket, cost, token, ready, now, sends=key, held=held)
        running.computes = not isinstance(token, AwaitedInputs)
        if after is not None:
            running.after, running.copy = after, self._driver.copies.get((stage, wanted.direction), 0.0)
        queue.submit(running)
        part.meter.dispatched(task)
        if after is not None:  # the transport still has the input
            part.meter.coming(wanted)
        if key is not None:
            self._recorder.sent(stage, task, OFFERED)  # before: it may be delivered at once
            (self._local if key.stage in self._parts else self._remote).offer(key, outputs)
            if self._foresees and (copies := self._driver.local.coming(key)) is not None:
                self._coming[key.stage][key.input] = running, copies
                self._ask_at[key.stage] = min(self._ask_at[key.stage], 0.0)
        for later in dispatch.ready:
            self._ready[stage][later] = perf_counter()
        for microbatch in dispatch.additions[1:]:
            part.accumulate(task.chunk, microbatch)
        if self._schedulers[stage].finished:
            part.finish()

    def coming(self, key: Key) -> None:
        self._recorder.got(key.stage, key.input, COMING)
        self._parts[key.stage].meter.coming(key.input)

    def delivered(self, key: Key) -> None:
        stage = key.stage % self._stages
        source = self._rules.placement.source(stage, key.input)
        assert source is not None, f"nobody sends the {key}"
        sender = key.stage - stage + source[0]
        self._recorder.sent(sender, source[1], DELIVERED)
        self._parts[sender].meter.delivered(source[1])

    def _failed(self, error: Exception, task: Task | None, stage: int) -> TrainingError:
        """Of a task, or with None of the last update; whoever shares it may be lost."""
        shared = task is None or self._agreement is not None
        if shared and (mailbox := self._driver._world.mailbox) is not None:
            mailbox.hear_of_losses()
        what = UPDATE if task is None else f"step {self._step}: {task} on {self._name(stage)}"
        return TrainingError(f"{what} failed: {error}")

    def _sleep(self) -> None:
        # A thread that wakes this one costs far more than a look, and rings but once for what it has seen.
        if any(queue.settled or (queue.flights and queue.flights[0].has_ended()) for queue in self._queues):
            return
        seconds = soonest_poll(self._transports)
        now = perf_counter()
        until = now + seconds
        for queue, stages in zip(self._queues, self._driver._sharing, strict=True):
            if seconds > SHORT_SLEEP_SECONDS:
                queue.watch()
            if not queue.as_it_is:  # its programs end by the clock
                until = min(until, queue.next_event(now))
            elif (soonest := min(map(self._ask_at.__getitem__, stages))) < inf:
                until = min(until, max(soonest, queue.room_at(now), now + SHORTEST_PAUSE))
        if self._delays is not None:
            until = min(until, self._delays.next_release())
        self._driver._bell.sleep(max(0.0, until - now))

    def _waiting(self) -> list[AnyAwaited]:
        """What this process waits for just now."""
        found: list[AnyAwaited] = []
        if any(queue.is_updating for queue in self._queues):  # first: all else waits for it
            found.append(ForDevices(what=UPDATE))
        for number, scheduler in self._schedulers.items():
            if not scheduler.finished:
                replica, stage = divmod(number, self._stages)
                why = self._machines[number].awaited()
                found.append(ForTask(step=self._step, stage=stage, replica=replica, why=why))
        running = [task for queue in self._queues for task in queue.running]
        return found + [ForProgram(step=self._step, task=task) for task in running]

    def _stalled(self) -> str:
        waits = "; ".join(f"{self._name(s)} waits for {c.awaited()}" for s, c in self._machines.items())
        updates = [UPDATE for queue in self._queues if queue.is_updating]
        running = ", ".join([*updates, *(str(task) for queue in self._queues for task in queue.running)])
        said = f"step {self._step}: nothing moved for {self._wait.waited:.0f} s"
        return f"{said}; running: {running or 'nothing'}; {waits}"
