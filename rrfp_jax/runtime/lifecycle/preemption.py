"""Ctrl-C, and SIGTERM, a scheduler's warning: stop at the next step boundary, all processes at the same one.

Perhaps only one process gets it, or all at different moments. So each notes it (`Stop.requested`), and the
notes travel with every gather. After the gather that ends a step all know the same (`Stop.agreed`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from time import monotonic

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.lifecycle.failure import fail
from rrfp_jax.runtime.processes.stop import Why
from rrfp_jax.runtime.processes.waits import LONGEST_SECONDS
from rrfp_jax.runtime.processes.world import World

SAVE_SECONDS = 120.0
"""After SIGTERM or Ctrl-C a run has so long to come to a step boundary. RRFP_SAVE_SECONDS changes it."""


def save_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_SAVE_SECONDS, or the default: how long a run is waited for after SIGTERM or Ctrl-C.

    Raises:
        UsageError: it is no number, or negative.
    """
    text = environment.get("RRFP_SAVE_SECONDS") or str(SAVE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_SECONDS:  # nor nan
        raise UsageError(
            f"RRFP_SAVE_SECONDS={text}: give the seconds that a run has after SIGTERM to end its step and "
            f"save, at most {LONGEST_SECONDS:.0f}, such as {SAVE_SECONDS:g}"
        )
    return seconds


class StopsAfterStep:
    """The answer to signals between the first step and the last: the run is to stop at a step boundary.

    A second signal ends this process at once, and so does the limit if there was no step boundary: even if
    the main thread is stuck.

    Args:
        world: is asked to stop.
        limit_seconds: until a step must have ended.
        say: is told why the run is to stop, and whether this was the last warning.
        leave: is called just before this process ends from here, to leave its terminal in order.
    """

    def __init__(
        self,
        world: World,
        limit_seconds: float,
        say: Callable[[Why, bool], None] = lambda why, at_once: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._limit = world, limit_seconds
        self._say, self._leave = say, leave
        self._deadline: float | None = None

    def heed(self, number: int) -> None:
        """Ask the run to stop; the second time, end."""
        stop, why = self._world.stop, Why.CTRL_C if number == signal.SIGINT else Why.SIGTERM
        asked = stop.requested >= Why.SIGTERM
        stop.request(why)
        self._say(why, asked)
        if asked:
            self._leave()
            fail(self._world, KeyboardInterrupt())
        self._deadline = monotonic() + self._limit

    def left(self) -> float | None:
        """Seconds until a step must have ended."""
        if self._deadline is None or self._world.stop.agreed >= Why.SIGTERM:
            return None
        return max(self._deadline - monotonic(), 0.0)

    def check(self) -> None:
        """End this process if no step has ended in time."""
        if self.left() == 0.0:
            self._leave()
            why = self._world.stop.requested
            fail(self._world, TrainingError(f"{why} came, and no step ended in the next {self._limit:g} s"))
