"""The driver: what steps run on in this process, from the first step to the last.

It opens the devices' queues and the transport for each step, and hands them to the loop in
`step_execution.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax

from rrfp_jax.core.measure.trace import TaskRecord
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.runtime.driver.device import DeviceQueue
from rrfp_jax.runtime.driver.garbage import collect_together, no_collections
from rrfp_jax.runtime.driver.stage_step import StageStep
from rrfp_jax.runtime.driver.step_execution import Means, StepExecution
from rrfp_jax.runtime.driver.timers import precise_timers
from rrfp_jax.runtime.group.agreement import Agreement
from rrfp_jax.runtime.mesh.layout import taking_turns
from rrfp_jax.runtime.processes.bell import Bell, EventBell
from rrfp_jax.runtime.processes.interrupts import interrupts_held
from rrfp_jax.runtime.processes.world import World
from rrfp_jax.runtime.transport.local import LocalTransport
from rrfp_jax.runtime.transport.protocol import Devices, Transport


class Driver:
    """Runs steps on the stages of this process. Its threads live only inside `run`, so none is ever left.

    Args:
        devices: of this process's stages, by stage (its stage replica, see `Layout`); programs run on all at
            once.
        world: the processes of the run.
        transport: how outputs reach the next stage.
        stall_seconds: without any progress for so long, a step is given up and what it waited for is named.
        queue: makes the queue of a device, from its name and what wakes the driver.
        scheduler: makes a stage's scheduler for a step; see also core/replay.py.
        agreement: with the other processes of this process's stage, if there are any.
    """

    def __init__(
        self,
        devices: Devices,
        world: World,
        transport: Transport | None = None,
        stall_seconds: float = 300.0,
        queue: Callable[[str, Callable[[], None]], DeviceQueue] = DeviceQueue,
        scheduler: Callable[[int, StepRules, Budget | None], StageScheduler] = StageScheduler,
        agreement: Agreement | None = None,
    ) -> None:
        self.scheduler, self.agreement = scheduler, agreement
        self.transport: Transport = transport or LocalTransport()
        self.devices = devices
        self._world, self._steps = world, 0
        self._stall_seconds = stall_seconds
        self._bell: Bell = world.mailbox or EventBell()
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
    ) -> list[TaskRecord]:
        """Run one step to the end of this process's part of it.

        Args:
            rules: of the step, equal for all stages.
            step: its number, for messages.
            parts: of this process's stages, by stage.
            budgets: in bytes, of all stages; empty for none.

        Raises:
            TrainingError: a program or a transfer failed, a process is gone, or nothing moved for
                `stall_seconds`.
        """
        round = self._world.next_round()
        self._steps += 1  # rounds are also counted by whoever shares a stage
        collect_together(self._steps, self._world.size)
        with interrupts_held() as interrupted, precise_timers(), no_collections(), ExitStack() as open_queues:
            for queue in self._queues:
                open_queues.enter_context(queue)
            agreed = self.agreement
            if agreed is not None and not agreed.alone and rules.hint is not None:  # else nothing is said
                open_queues.enter_context(agreed.carrier)
            # Copies between stages are meant, whatever guard a user has set against those that are not.
            open_queues.enter_context(jax.transfer_guard_device_to_device("allow"))
            try:
                under_way = StepExecution(self._means(), rules, step, round, parts, budgets)
                self.transport.begin(round, self.devices, under_way)
                records = under_way.run(interrupted)
            except BaseException:
                self.transport.reset()
                raise
            self.transport.end()
            return records

    def close(self) -> None:
        """No step follows; returns at once, and does nothing the second time."""
        self.transport.close()
        if self.agreement is not None:
            self.agreement.close()

    def _means(self) -> Means:
        return Means(
            world=self._world,
            transport=self.transport,
            queues=self._queues,
            sharing=self._sharing,
            bell=self._bell,
            stall_seconds=self._stall_seconds,
            scheduler=self.scheduler,
            agreement=self.agreement,
        )

    def gather(self, what: str, value: Any, records: Sequence[TaskRecord], step: int) -> list[Any]:
        """What every process says of a step that has run, by rank; stages of several compare their orders.

        Args:
            what: it is, for messages.
            value: plain data.
            records: what `run` has returned.
            step: its number.

        Raises:
            TrainingError: see `World.gather`; or processes of a stage have dispatched different tasks.
        """
        account = self.agreement.account(records) if self.agreement is not None else None
        gathered = self._world.gather(what, [value, account])
        if self.agreement is not None:
            self.agreement.settle([account for _, account in gathered], step)
        return [value for value, _ in gathered]
