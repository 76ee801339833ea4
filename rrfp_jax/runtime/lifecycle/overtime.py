"""Threads and exit handlers of the user's that outlast the main thread: they are named, and have a limit.

Python waits for them for ever. By then all that the run computes and saves is done. The time in which this
process says goodbye to the others, which has limits of its own, does not count.
"""

from __future__ import annotations

import threading
from math import inf, isinf
from time import monotonic, sleep

from rrfp_jax.errors import TrainingError
from rrfp_jax.printing import warn
from rrfp_jax.runtime.lifecycle.failure import fail
from rrfp_jax.runtime.processes.stacks import own_threads
from rrfp_jax.runtime.processes.world import World

TICK_SECONDS = 0.5

WORD_SECONDS = 5.0
"""Or half of the limit: after so long it is said who is waited for."""


def limit_overtime(world: World, limit: float) -> None:
    """From the main thread's end on, have this process last for so many seconds at most.

    A process that neither a launcher nor other ranks wait for may last as long as it likes.
    """
    if world.folder is None and world.size == 1:
        limit = inf
    threading.Thread(target=_watch, args=[world, limit], name="rrfp-overtime", daemon=True).start()


def _watch(world: World, limit: float) -> None:
    while threading.main_thread().is_alive():  # joining it would be in Python's way, which looks at its lock
        sleep(TICK_SECONDS)
    early = min(WORD_SECONDS, limit / 2)
    _outlast(world, early)
    at_most = "" if isinf(limit) else f", {limit:g} s at most"
    warn(f"{world.describe(world.rank)}: its work is done; it waits for {waited_for()} to end{at_most}")
    _outlast(world, limit - early)
    fail(world, TrainingError(f"its work is done, but {waited_for()} has not ended within {limit:g} s"))


def _outlast(world: World, seconds: float) -> None:
    """Let so many seconds pass in which this process does not say goodbye."""
    while seconds > 0:
        begun = monotonic()
        sleep(min(TICK_SECONDS, seconds))
        if not world.leaving.says_goodbye:
            seconds -= monotonic() - begun


def waited_for() -> str:
    """What keeps this process from ending: a thread, or an exit handler, by name and line."""
    lasting = {thread.name for thread in threading.enumerate() if not thread.daemon}
    threads = own_threads()
    main = next((thread for thread in threads if thread.is_main), None)
    for thread in threads:
        if thread.name in lasting and not thread.is_main:
            return f"the thread {thread.name}, in {thread.users or thread.frames[0]},"
    at = main and (main.users or (main.frames[0] if main.frames else None))
    return f"an exit handler{f', in {at},' if at else ''}"
