"""Ctrl-C at points where nothing is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: after a program has eaten its
donated inputs and before its outputs are stored, between two stages' updates, or while a thread starts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is noted, and raised at the end; the value tells whether it came.

    A second Ctrl-C is not held, so that even a hanging program can be left.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False  # KeyboardInterrupt is not raised here, or not by Python's own handler
        return
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
