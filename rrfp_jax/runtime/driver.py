"""The driver: feeds the core, dispatches what it decides, and is the only place that reads a clock.

It goes round three moves until every task has ended: collect what has ended and arrived, fill the devices
that have room, sleep. It sleeps on one event that the devices' watching threads set, so a ready task is
picked up within about 100 us and an idle driver costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter

from rrfp_jax.core.events import ROOM, Accumulate, Arrived, Instruction
from rrfp_jax.core.scheduler import StageScheduler, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.core.trace import StepTrace, TaskRecord
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.device import DeviceQueue, Running
from rrfp_jax.runtime.interrupts import interrupts_held
from rrfp_jax.runtime.stage import Stage, StageStep
from rrfp_jax.runtime.transport import Key, LocalTransport, Transport

TRANSFER_POLL_SECONDS = 2e-5
"""Pause between looks at a transfer whose data exists: it takes but a moment."""

LONGEST_SLEEP_SECONDS = 1.0


class Driver:
    """Runs steps on the stages of this process. Its threads live only inside `run`, so none is ever left.

    Args:
        stages: all stages of the pipeline, in order.
        transport: how outputs reach the next stage.
        stall_seconds: without any progress for so long, a step is given up and what it waited for is named.
    """

    def __init__(
        self, stages: Sequence[Stage], transport: Transport | None = None, stall_seconds: float = 300.0
    ) -> None:
        self.transport: Transport = transport or LocalTransport()
        self._stages = stages
        self._stall_seconds = stall_seconds
        self._wake = threading.Event()
        by_device = {stage.device: DeviceQueue(stage.device, self._wake) for stage in stages}
        self._queues = list(by_device.values())
        self._queue_of = [by_device[stage.device] for stage in stages]
        # Later stages first where several share a device: what is furthest along frees memory soonest.
        self._sharing = [[s.index for s in reversed(stages) if s.device == q.device] for q in self._queues]

    def run(self, rules: StepRules, step: int, parts: Sequence[StageStep]) -> StepTrace:
        """Run one step to its end.

        Args:
            rules: of the step, equal for all stages.
            step: its number, for keys and messages.
            parts: each stage's part, in order.

        Raises:
            TrainingError: a program failed, or nothing moved for `stall_seconds`.
        """
        with interrupts_held() as interrupted, ExitStack() as open_queues:
            for queue in self._queues:
                open_queues.enter_context(queue)
            try:
                return _Step(self, rules, step, parts).run(interrupted)
            except BaseException:
                self.transport.reset()
                raise


class _Step:
    """One step under way."""

    def __init__(self, driver: Driver, rules: StepRules, step: int, parts: Sequence[StageStep]) -> None:
        self._driver = driver
        self._transport = driver.transport
        self._rules, self._step, self._parts = rules, step, parts
        self._schedulers = [StageScheduler(part.stage.index, rules) for part in parts]
        self._began = perf_counter()
        self._ready: list[dict[Task, float]] = [{} for _ in parts]  # when each stage's tasks became ready
        self._idle = [False] * len(parts)  # had nothing to run when last asked, and nothing came since
        self._records: list[TaskRecord] = []
        per_stage = rules.microbatches * rules.placement.chunks * (1 if rules.forward_only else 2)
        self._total = per_stage * len(parts)

    def run(self, interrupted: Callable[[], bool]) -> StepTrace:
        progress = perf_counter()
        while len(self._records) < self._total:
            if interrupted():
                raise KeyboardInterrupt
            moved = self._collect()
            moved |= self._fill()
            if moved:
                progress = perf_counter()
            elif perf_counter() - progress > self._driver._stall_seconds:
                raise TrainingError(self._stalled(perf_counter() - progress))
            if len(self._records) < self._total:
                self._sleep()
        return StepTrace(self._step, len(self._parts), self._records)

    def _collect(self) -> bool:
        """Note the programs that have ended and the inputs that have arrived."""
        moved = False
        for queue in self._driver._queues:
            for running, start in queue.ended():
                moved = True
                if running.error is not None:
                    raise TrainingError(
                        f"step {self._step}: {running.task} on stage {running.stage} failed: {running.error}"
                    ) from running.error
                key = self._message(running.stage, running.task)
                if key is not None:
                    self._transport.produced(key)
                self._records.append(
                    TaskRecord(
                        running.stage,
                        running.task,
                        running.bucket,
                        running.ready,
                        running.dispatched,
                        start,
                        running.end,
                    )
                )
        for key, arrays in self._transport.poll():
            moved = True
            self._parts[key.stage].receive(key.task, arrays)
            self._schedulers[key.stage].handle(Arrived(key.task))
            self._ready[key.stage][key.task] = perf_counter()
            self._idle[key.stage] = False
        return moved

    def _fill(self) -> bool:
        """Give every device that has room the best task of its stages."""
        moved = False
        for queue, stages in zip(self._driver._queues, self._driver._sharing, strict=True):
            while queue.room_at(now := perf_counter()) <= now and self._dispatch_one(queue, stages, now):
                moved = True
        return moved

    def _dispatch_one(self, queue: DeviceQueue, stages: Sequence[int], now: float) -> bool:
        for stage in stages:
            if self._idle[stage]:
                continue
            instructions = self._schedulers[stage].handle(ROOM)
            if instructions:
                self._dispatch(queue, stage, instructions, now)
                return True
            self._idle[stage] = True
        return False

    def _dispatch(
        self, queue: DeviceQueue, stage: int, instructions: Sequence[Instruction], now: float
    ) -> None:
        part, task = self._parts[stage], instructions[0].task  # type: ignore[union-attr]
        try:
            outputs, token = part.run(task)
        except Exception as error:
            raise TrainingError(f"step {self._step}: {task} on stage {stage} failed: {error}") from error
        ready = self._ready[stage].pop(task, self._began)
        bucket = part.buckets[task.microbatch]
        queue.submit(Running(stage, task, bucket, (part.phase, stage, task.kind, bucket), token, ready, now))
        key = self._message(stage, task)
        if key is not None:
            self._transport.offer(key, outputs)
            self._transport.pull(key, self._parts[key.stage].stage.device)
        elif task.kind is FORWARD:
            self._ready[stage][Task(BACKWARD, task.chunk, task.microbatch)] = perf_counter()
        for instruction in instructions[1:]:
            if isinstance(instruction, Accumulate):
                part.accumulate(instruction.microbatch)

    def _message(self, stage: int, task: Task) -> Key | None:
        destination = self._rules.placement.destination(stage, task)
        return None if destination is None else Key(self._step, *destination)

    def _sleep(self) -> None:
        if self._transport.busy():
            wait = TRANSFER_POLL_SECONDS
        else:
            now = perf_counter()
            rooms = [at for queue in self._driver._queues if (at := queue.room_at(now)) > now]
            wait = min([LONGEST_SLEEP_SECONDS, *(at - now for at in rooms)])
            for queue in self._driver._queues:
                queue.watch()
        if self._driver._wake.wait(wait):
            self._driver._wake.clear()

    def _stalled(self, seconds: float) -> str:
        waiting = "; ".join(f"stage {s.stage} waits for {s.awaited()}" for s in self._schedulers)
        running = [f"{task}" for queue in self._driver._queues for task in queue.running]
        return (
            f"step {self._step}: nothing moved for {seconds:.0f} s; "
            f"running: {', '.join(running) or 'nothing'}; {waiting}"
        )
