"""A data loader that asks other processes for its microbatches, in the ways in which people write loaders."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.pool import Pool
from typing import Any

from tests.support import toy

MADE = toy.microbatches
TIMES = 3
"""So often are workers made that do not last."""
LONG = 1000.0
"""Seconds that a child lives if nobody ends it."""

kept: list[Any] = []
"""Workers that live as long as this process."""


def use(how: str) -> None:
    """Have all microbatches of the toy model made as `WAYS` has it."""
    toy.microbatches = lambda *given, **more: WAYS[how](given, more)


def made(given: Any, more: Any) -> Any:
    """The microbatches; in whichever process."""
    return MADE(*given, **more)


def keep_a_pool(how: str = "fork") -> None:
    """Have a pool of workers, for the rest of this process."""
    kept.append(multiprocessing.get_context(how).Pool(2))


def _is_due() -> bool:
    """Whether workers are to be made once more, which takes long."""
    kept.append(None)
    return len(kept) <= TIMES


def _pool_kept(how: str) -> Callable[[Any, Any], Any]:
    def ask(given: Any, more: Any) -> Any:
        if not kept:
            keep_a_pool(how)
        pool: Pool = kept[0]
        return pool.apply(made, (given, more))

    return ask


def _pool_closed(how: str) -> Callable[[Any, Any], Any]:
    def ask(given: Any, more: Any) -> Any:
        if not _is_due():
            return made(given, more)
        with multiprocessing.get_context(how).Pool(1) as pool:
            found = pool.apply(made, (given, more))
            pool.close()
            pool.join()
        return found

    return ask


def _process_terminated(how: str) -> Callable[[Any, Any], Any]:
    def ask(given: Any, more: Any) -> Any:
        if not _is_due():
            return made(given, more)
        context: Any = multiprocessing.get_context(how)
        worker = context.Process(target=time.sleep, args=[LONG], daemon=True)
        worker.start()
        time.sleep(0.05)
        worker.terminate()
        worker.join()
        if worker.exitcode is None or worker.exitcode >= 0:
            raise AssertionError(f"the worker ended with {worker.exitcode}")
        return made(given, more)

    return ask


def _forked(then: Callable[[], None]) -> Callable[[Any, Any], Any]:
    def ask(given: Any, more: Any) -> Any:
        if not kept:
            kept.append(os.fork())
            if kept[0] == 0:
                then()
        return made(given, more)

    return ask


def _live_on() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)


def _fail() -> None:
    raise ValueError("in the child")


def _nothing() -> None:
    """The child goes on as if it were its parent."""


def _started(**how: Any) -> Callable[[Any, Any], Any]:
    def ask(given: Any, more: Any) -> Any:
        if not kept:
            kept.append(subprocess.Popen(["sleep", "3"], **how))
        return made(given, more)

    return ask


METHODS = ("fork", "spawn", "forkserver")
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"{how}, pool kept": _pool_kept(how) for how in METHODS},
    **{f"{how}, pool closed": _pool_closed(how) for how in METHODS},
    **{f"{how}, process terminated": _process_terminated(how) for how in METHODS},
    "os.fork, child lives": _forked(_live_on),
    "os.fork, child raises": _forked(_fail),
    "os.fork, child exits": _forked(sys.exit),
    "os.fork, child returns": _forked(_nothing),
    "subprocess": _started(),
    "subprocess, preexec_fn": _started(preexec_fn=int),
}
