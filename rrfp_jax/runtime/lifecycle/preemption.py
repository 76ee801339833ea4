"""SIGTERM, a scheduler's warning: stop at the next step boundary, all processes at the same one.

Perhaps only one process gets it, or all at different moments. So each notes it (`Stop.requested`), and the
notes travel with every gather. After the gather that ends a step all know the same (`Stop.agreed`).
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.lifecycle.failure import fail
from rrfp_jax.runtime.processes.signals import Signals, collected_signals
from rrfp_jax.runtime.processes.waits import LONGEST_SECONDS
from rrfp_jax.runtime.processes.world import World

SAVE_SECONDS = 120.0
"""After SIGTERM a run has so long to come to a step boundary. RRFP_SAVE_SECONDS changes it."""


def save_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_SAVE_SECONDS, or the default: how long a run is waited for after SIGTERM.

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


@contextmanager
def sigterm_noted(world: World, limit_seconds: float) -> Iterator[None]:
    """Inside, SIGTERM sets `world.stop.requested` instead of ending this process.

    A second one ends it at once, and so does the limit if there was no step boundary: even if the main thread
    is stuck, for a thread of its own listens. Where a program has a handler of its own, that stays.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with collected_signals([signal.SIGTERM]) as signals:
        stop_end, stopper = os.pipe()
        thread = threading.Thread(
            target=_listen, args=(world, limit_seconds, signals, stop_end), name="rrfp-sigterm", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            os.close(stopper)
            thread.join()
            os.close(stop_end)


def _listen(world: World, limit_seconds: float, signals: Signals, stop_end: int) -> None:
    """Until the other end of `stop_end` is closed."""
    deadline = None
    while True:
        left = None if deadline is None or world.stop.agreed else max(deadline - monotonic(), 0.0)
        readable, _, _ = select.select([signals.fileno(), stop_end], [], [], left)
        if stop_end in readable:
            return
        for _ in signals.take():
            if world.stop.requested:
                fail(world, KeyboardInterrupt())
            world.stop.request()
            deadline = monotonic() + limit_seconds
        if deadline is not None and monotonic() >= deadline and not world.stop.agreed:
            fail(world, TrainingError(f"SIGTERM came, and no step ended in the next {limit_seconds:g} s"))
