"""The processes that this one forks or starts, such as the workers of a user's data loader.

A forked child inherits descriptors, signal handlers and what is called at the end. All of that is its
parent's, so the child gives it up before anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_given_up: list[Callable[[], object]] = []


def children_give_up(act: Callable[[], object]) -> None:
    """From now on forked children begin by calling this; what was asked for last is called first."""
    _given_up.append(act)


@contextmanager
def children_giving_up(act: Callable[[], object]) -> Iterator[None]:
    """Inside, forked children begin by calling this."""
    children_give_up(act)
    try:
        yield
    finally:
        with suppress(ValueError):  # a child has called it
            _given_up.remove(act)


def exit_now(status: int, *, also_waited_for: bool = False) -> NoReturn:
    """End this process without Python's way out, and the workers that `multiprocessing` would end with it.

    Args:
        status: with which it ends, whatever goes wrong.
        also_waited_for: end those workers, too, that Python would wait for.
    """
    try:
        if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
            for worker in multiprocessing.active_children():
                if worker.daemon or also_waited_for:
                    worker.terminate()
    finally:
        os._exit(status)


def _give_up() -> None:
    while _given_up:
        with suppress(OSError):
            _given_up.pop()()


os.register_at_fork(after_in_child=_give_up)
