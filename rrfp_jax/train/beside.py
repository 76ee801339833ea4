"""Compiles for another split beside the steps, on a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.runtime._jax import adopt, settings_here
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.resplit import Ready, compiled_for_split
from rrfp_jax.runtime.programs.compiler import IS_DROPPED


class Compiling:
    """Compiles for another split beside the steps, on a thread; arguments as for `compiled_for_split`.

    The interpreter waits for that thread when it ends. So it begins no further program then, nor once it has
    been dropped; XLA cannot be interrupted, so those that it is at are finished.
    """

    def __init__(self, engine: Engine, split: Sequence[int], rules: Sequence[StepRules]) -> None:
        self._end = end = Future[Ready | str]()
        dropped, settings = threading.Event(), settings_here()
        # Nobody wants it any more: it ends with what it is at.
        self.drop = weakref.finalize(self, dropped.set)
        # Before it waits for the threads of pools, which would do all that they have been given.
        threading._register_atexit(dropped.set)  # type: ignore[attr-defined]  # nothing public comes as early

        def compile_all() -> None:  # without `self`, which is to be dropped meanwhile
            adopt(settings)  # JAX has some by thread
            IS_DROPPED.set(dropped.is_set)
            try:
                end.set_result(compiled_for_split(engine, split, rules, quiet=True))
            except Exception as error:  # whatever it is, training goes on without
                end.set_result(f"{type(error).__name__}: {error}")  # its traceback would keep the engine

        threading.Thread(name="compiles for another split", target=compile_all).start()

    @property
    def found(self) -> Ready | str | None:
        """What has been compiled, or why that could not be; None as long as it is not over."""
        return self._end.result() if self._end.done() else None
