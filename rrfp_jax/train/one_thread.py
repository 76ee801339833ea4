"""A Trainer is used by one thread at a time; another is refused before it has touched anything."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rrfp_jax.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class OneThread:
    """Who uses a Trainer just now."""

    def __init__(self) -> None:
        self._lock, self._user = threading.RLock(), ""

    @contextmanager
    def uses(self, method: str) -> Iterator[None]:
        """Inside, other threads are refused; the same thread may come again, as from `on_step`.

        Raises:
            UsageError: another thread is inside.
        """
        me = f"Trainer.{method} in thread {threading.current_thread().name!r}"
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"{me} while {self._user} is running: a Trainer is used by one thread at a time; wait for "
                f"the other, or hold a lock around both"
            )
        before, self._user = self._user, me
        try:
            yield
        finally:
            self._user = before
            self._lock.release()


class Used(Protocol):
    """What has methods of this kind."""

    _one_thread: OneThread


U = TypeVar("U", bound=Used)


def one_thread(
    name: str,
) -> Callable[[Callable[Concatenate[U, P], R]], Callable[Concatenate[U, P], R]]:
    """A decorator for a method of a Trainer, which messages call by this name."""

    def decorated(method: Callable[Concatenate[U, P], R]) -> Callable[Concatenate[U, P], R]:
        @functools.wraps(method)
        def alone(self: U, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._one_thread.uses(name):
                return method(self, *args, **kwargs)

        return alone

    return decorated
