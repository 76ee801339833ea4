"""When Python collects garbage: whoever is stopped for that, all stages wait for.

Once so much more is alive than the last time, Python looks at all of it, which takes 0.1 s in a small run.
That comes in another step on each rank, and each time all others wait. So all ranks do it together, soon
after the start, when programs have been compiled, and then seldom; in between there is no need.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FIRST, EVERY = 2, 512
"""Rounds of tasks before which all garbage is collected: the first, and how many from one to the next."""


def collect_together(round: int, ranks: int) -> None:
    """Collect all garbage if it is time for that; alone nobody waits, and it is left to Python.

    Args:
        round: how many rounds of tasks have begun, this one included; equal on all ranks.
        ranks: how many there are.
    """
    if ranks > 1 and round % EVERY == FIRST and gc.isenabled():
        gc.collect()


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, Python looks for no cycles; among what is young it does soon after."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
