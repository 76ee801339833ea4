"""Whether decisions can be had again: what a scheduler was told, told to another one.

A scheduler reads no clock and draws nothing, so the same events must bring the same instructions. `Driver`
takes `LoggedScheduler` in place of `StageScheduler` to keep a run's events; without it nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.core.events import Event, Instruction
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules


class LoggedScheduler(StageScheduler):
    """A stage scheduler that keeps what it was told and what it answered.

    Attributes:
        budget: its own.
        log: each event with the instructions that followed.
    """

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None = None) -> None:
        super().__init__(stage, rules, budget)
        self.budget = budget
        self.log: list[tuple[Event, Sequence[Instruction]]] = []

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """See `StageScheduler.handle`."""
        instructions = super().handle(event)
        self.log.append((event, instructions))
        return instructions


class ReplayError(RuntimeError):
    """The same events brought other instructions."""


def replay(logged: LoggedScheduler) -> None:
    """Tell a new scheduler of the same rules the same events, and compare every answer.

    Raises:
        ReplayError: naming the first event whose answer differs.
        IllegalEvent, ScheduleError: see `StageScheduler.handle`.
    """
    scheduler = StageScheduler(logged.stage, logged.rules, logged.budget)
    for number, (event, before) in enumerate(logged.log):
        now = scheduler.handle(event)
        if now != before:
            raise ReplayError(f"stage {logged.stage}, event {number}, {event}: {before} before, {now} now")
