"""When a failed run is started again. Pure: no files, no processes, no clock.

A run that fails at the same place each time would do so for ever. So restarts must bring it further: to a
training step that no attempt before had begun. After an attempt that did, the next one follows soon. After
one that did not, it follows later; after three of those in a row there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.errors import FAILED

BACK_OFF_SECONDS = (1.0, 5.0, 30.0)
"""Wait before a restart, after none, one and two restarts in a row that brought the run no further."""

NO_STEP = -1


@dataclass(frozen=True)
class Verdict:
    """What follows an attempt.

    Attributes:
        wait: seconds until the next one; None if there is none.
        reason: why there is none, if that is not plain from how the run ended.
    """

    wait: float | None
    reason: str = ""


def after_attempt(
    status: int,
    reached: Sequence[int],
    most: int,
    back_off: Sequence[float] = BACK_OFF_SECONDS,
    before: int = 0,
) -> Verdict:
    """Whether a run is started again.

    Args:
        status: of the latest attempt; only a failed run is started again, not one that was refused or
            interrupted.
        reached: the furthest training step that each attempt so far has begun, or NO_STEP.
        most: restarts allowed.
        back_off: seconds to wait, by the number of fruitless restarts.
        before: restarts before these attempts, which begin after one that did not fail.
    """
    restarts, fruitless = before + len(reached) - 1, _fruitless(reached)
    if status != FAILED or most == 0:
        return Verdict(None)
    if restarts >= most:
        return Verdict(None, f"not restarted again: --max-restarts={most}")
    if fruitless >= len(back_off):
        where = "the first step" if max(reached) == NO_STEP else f"step {max(reached)}"
        return Verdict(None, f"not restarted again: {fruitless} restarts brought it no further than {where}")
    return Verdict(back_off[fruitless])


def _fruitless(reached: Sequence[int]) -> int:
    """How many restarts at the end have brought the run no further than the attempts before them."""
    count = 0
    for number in range(1, len(reached)):
        count = 0 if reached[number] > max(reached[:number]) else count + 1
    return count
