"""Replaying a scheduler's log: another scheduler is told the same events, and must decide the same.

A scheduler reads no clock and draws nothing, so the same events must bring the same answers. Its log
(core/scheduler.py) is always on, so whatever has just run can be replayed.
"""

from __future__ import annotations

from rrfp_jax.core.scheduler import StageScheduler


class ReplayError(RuntimeError):
    """The same events led to another task."""


def replay(logged: StageScheduler) -> StageScheduler:
    """Tell a new scheduler of the same rules the same events, and compare what it dispatches."""
    if len(logged.log.entries) == logged.log.entries.maxlen:  # some may have been dropped
        raise ValueError(
            f"stage {logged.stage}: the log holds only the latest {len(logged.log.entries)} entries, and a "
            "replay must begin with the step: give the scheduler a class with `kept = None`"
        )
    scheduler = StageScheduler(logged.stage, logged.rules, logged.budget)
    for number, (event, before) in enumerate(logged.log):
        dispatch = scheduler.handle(event)
        now = None if dispatch is None else dispatch.task
        if now != before:
            raise ReplayError(f"stage {logged.stage}, event {number}, {event}: {before} before, {now} now")
    return scheduler
