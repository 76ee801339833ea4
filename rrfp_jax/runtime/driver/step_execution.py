"""The loop of one step: it feeds the core, dispatches what the core decides, and reads the clock for it.

Three moves are repeated until every task of this process's stages has ended: collect what has ended and
arrived, fill the devices that have room, sleep. The threads that watch devices, and messages, wake it. So a
ready task is picked up within about 100 us, and an idle driver costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from rrfp_jax.core.events import ROOM, Arrived, Dispatch
from rrfp_jax.core.measure.trace import TaskRecord
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import MOST_QUEUED, Budget, StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Direction, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.driver.device import DEEPEST, DeviceQueue, Running
from rrfp_jax.runtime.driver.stage_step import StageStep
from rrfp_jax.runtime.group.agreement import Agreement
from rrfp_jax.runtime.mesh.layout import stage_replica_name
from rrfp_jax.runtime.processes.bell import Bell
from rrfp_jax.runtime.processes.round_board import ARRIVED, COMING, DELIVERED, OFFERED, PRODUCED
from rrfp_jax.runtime.processes.waits import LONGEST_SLEEP_SECONDS, Wait
from rrfp_jax.runtime.processes.world import World
from rrfp_jax.runtime.transport.protocol import Key, Transport

SHORT_SLEEP_SECONDS = 1e-3
"""After so short a sleep the driver looks at its devices itself; before longer ones it has them watched."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """What steps run on.

    Attributes:
        world: the processes of the run.
        transport: how outputs reach the next stage.
        queues: of this process's devices.
        sharing: for each of them its stages, in the order in which they are asked for a task.
        bell: on which one sleeps.
        stall_seconds: limit on waiting without any progress.
        scheduler: makes a stage's scheduler for a step.
        agreement: with the other processes of this process's stage, if there are any.
    """

    world: World
    transport: Transport
    queues: Sequence[DeviceQueue]
    sharing: Sequence[Sequence[int]]
    bell: Bell
    stall_seconds: float
    scheduler: Callable[[int, StepRules, Budget | None], StageScheduler]
    agreement: Agreement | None


class StepExecution:
    """One step under way, and the witness of what its messages take.

    Args:
        means: what it runs on.
        rules: of the step.
        step: its number, for messages.
        round: of its messages.
        parts: of this process's stages, by stage replica.
        budgets: in bytes, of all stages; empty for none.
    """

    def __init__(
        self,
        means: Means,
        rules: StepRules,
        step: int,
        round: int,
        parts: Mapping[int, StageStep],
        budgets: Sequence[Budget | None],
    ) -> None:
        self._means = means
        self._transport, self._recorder = means.transport, means.world.recorder
        self._board = self._recorder.board
        self._rules, self._step, self._round, self._parts = rules, step, round, parts
        self._stages = rules.placement.stages
        self._schedulers = {
            stage_replica: means.scheduler(
                stage_replica % self._stages, rules, budgets[stage_replica] if budgets else None
            )
            for stage_replica in parts
        }
        self._machines: dict[int, StageScheduler | Agreement] = {**self._schedulers}
        self._recorder.begin_round(round, step, rules, list(parts))
        shared = means.agreement is not None and not means.agreement.alone
        self._agreement = means.agreement if shared else None
        if self._agreement is not None:
            ((stage, scheduler),) = self._schedulers.items()
            self._agreement.begin(round, scheduler)
            self._machines[stage] = self._agreement
            limited = bool(budgets) and budgets[stage] is not None  # by bytes, which count on the usual depth
            most = MOST_QUEUED if limited else DEEPEST
            means.queues[0].decide_ahead(self._agreement.lead, most)
        for part in parts.values():
            part.meter.begin()
        self._began = perf_counter()
        self._wait: Wait  # of `run`
        self._ready: dict[int, dict[Task, float]] = {stage: {} for stage in parts}  # since when
        self._late: dict[tuple[int, Task], float] = {}  # of that, how much was injected; by stage and task
        self._idle = dict.fromkeys(parts, False)  # had nothing to run when last asked, and nothing came since
        self._records: list[TaskRecord] = []
        self._total = sum(scheduler.tasks for scheduler in self._schedulers.values())

    def run(self, interrupted: Callable[[], bool]) -> list[TaskRecord]:
        """To the end of this process's part; `interrupted` tells whether to break it off."""
        try:
            with self._means.world.waits_for(self._waiting, self._means.stall_seconds) as self._wait:
                self._run(interrupted)
        finally:
            del self._wait  # it knows this step: both, and all arrays, would stay until garbage is collected
        return self._records

    def _run(self, interrupted: Callable[[], bool]) -> None:
        while len(self._records) < self._total:
            if interrupted():
                raise KeyboardInterrupt
            moved = self._collect()
            moved |= self._fill()
            if moved:
                self._wait.progressed()
            elif self._wait.reached():
                raise TrainingError(self._stalled())
            if len(self._records) < self._total:
                self._sleep()

    def _collect(self) -> bool:
        """Note the programs that have ended and the inputs that have arrived."""
        moved = False
        for queue in self._means.queues:
            for running, start in queue.ended():
                moved = True
                self._board.ended()
                if running.error is not None:
                    raise self._failed(running.task, running.stage, running.error) from running.error
                if running.sends is not None:
                    self._transport.produced(running.sends, running.end)
                    self._board.sent(running.stage, running.task, PRODUCED)
                self._records.append(
                    TaskRecord(
                        running.stage,
                        running.task,
                        running.bucket,
                        running.ready,
                        running.dispatched,
                        start,
                        running.end,
                        running.delayed,
                        self._late.pop((running.stage, running.task), 0.0) if self._late else 0.0,
                    )
                )
        for key, arrays, _, late in self._transport.poll():
            moved = True
            self._board.got(key.stage, key.input, ARRIVED)
            self._machines[key.stage].handle(Arrived(key.input))
            task = self._schedulers[key.stage].task_for(*key.input)
            self._parts[key.stage].receive(task, arrays)
            self._ready[key.stage][task] = perf_counter()
            if late:
                self._late[key.stage, task] = late
            self._idle[key.stage] = False
        if self._agreement is not None and self._agreement.hear():
            self._idle = dict.fromkeys(self._idle, False)
        return moved

    def _fill(self) -> bool:
        """Give every device that has room the best task of its stages."""
        moved = False
        for queue, stages in zip(self._means.queues, self._means.sharing, strict=True):
            while queue.room_at(now := perf_counter()) <= now and self._dispatch_one(queue, stages, now):
                moved = True
        return moved

    def _dispatch_one(self, queue: DeviceQueue, stages: Sequence[int], now: float) -> bool:
        for stage in stages:
            if self._idle[stage]:
                continue
            dispatch = self._machines[stage].handle(ROOM)
            if dispatch is not None:
                self._dispatch(queue, stage, dispatch, now)
                return True
            self._idle[stage] = True
        return False

    def _dispatch(self, queue: DeviceQueue, stage: int, dispatch: Dispatch, now: float) -> None:
        part, (task, additions) = self._parts[stage], dispatch
        # Noted before: a collective out of order may end the process.
        self._recorder.dispatched(self._step, stage % self._stages, task)
        try:
            outputs, token = part.run(task, dispatch.in_turn)
        except Exception as error:
            raise self._failed(task, stage, error) from error
        ready = self._ready[stage].pop(task, self._began)
        bucket = part.buckets[task.microbatch]
        cost = part.phase, stage, task.chunk, task.kind, part.shapes[task.microbatch]
        key = self._message(stage, task)
        queue.submit(Running(self._step, stage, task, bucket, cost, token, ready, now, sends=key))
        part.meter.dispatched(task)
        if key is not None:
            self._board.sent(stage, task, OFFERED)  # before: it may be delivered at once
            self._transport.offer(key, outputs)
        elif task.kind is FORWARD:
            backward = self._schedulers[stage].task_for(Direction.BACKWARD, task.chunk, task.microbatch)
            self._ready[stage][backward] = perf_counter()
        if task.kind is INPUT:
            self._ready[stage][Task(WEIGHT, task.chunk, task.microbatch)] = perf_counter()
        for microbatch in additions[1:]:
            part.accumulate(task.chunk, microbatch)

    def coming(self, key: Key) -> None:
        """See `transport.Witness.coming`."""
        self._board.got(key.stage, key.input, COMING)
        self._parts[key.stage].meter.coming(key.input)

    def delivered(self, key: Key) -> None:
        """See `transport.Witness.delivered`."""
        stage = key.stage % self._stages
        source = self._rules.placement.source(stage, key.input)
        assert source is not None, f"nobody sends the {key}"
        sender = key.stage - stage + source[0]
        self._board.sent(sender, source[1], DELIVERED)
        self._parts[sender].meter.delivered(source[1])

    def _failed(self, task: Task, stage_replica: int, error: Exception) -> TrainingError:
        if self._agreement is not None and self._means.world.mailbox is not None:
            self._means.world.mailbox.hear_of_losses()  # of whoever shares the stage
        return TrainingError(f"step {self._step}: {task} on {self._name(stage_replica)} failed: {error}")

    def _name(self, stage_replica: int) -> str:
        return stage_replica_name(stage_replica, self._stages)

    def _message(self, stage_replica: int, task: Task) -> Key | None:
        stage = stage_replica % self._stages
        destination = self._rules.placement.destination(stage, task)
        if destination is None:
            return None
        to, wanted = destination
        return Key(self._round, stage_replica - stage + to, wanted)

    def _sleep(self) -> None:
        patience = self._transport.patience()
        now = perf_counter()
        until = min(queue.next_event(now) for queue in self._means.queues)
        if patience is None:
            patience = LONGEST_SLEEP_SECONDS
        if patience > SHORT_SLEEP_SECONDS:
            for queue in self._means.queues:
                queue.watch()
        self._means.bell.sleep(min(patience, until - now))

    def _waiting(self) -> list[str]:
        """What this process waits for and since when, for messages."""
        since = f"in step {self._step}, since {self._wait.waited:.1f} s"
        unfinished = [s for s, scheduler in self._schedulers.items() if not scheduler.finished]
        waits = [f"{self._machines[s].awaited()} on {self._name(s)} {since}" for s in unfinished]
        running = [task for queue in self._means.queues for task in queue.running]
        return waits + [f"the end of {task} {since}" for task in running]

    def _stalled(self) -> str:
        waits = "; ".join(f"{self._name(s)} waits for {c.awaited()}" for s, c in self._machines.items())
        running = ", ".join(str(task) for queue in self._means.queues for task in queue.running)
        said = f"step {self._step}: nothing moved for {self._wait.waited:.0f} s"
        return f"{said}; running: {running or 'nothing'}; {waits}"
