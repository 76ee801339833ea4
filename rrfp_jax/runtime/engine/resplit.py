"""Another split between two steps: layers move to other stages, device to device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.progress import silent
from rrfp_jax.runtime._jax import Settings, adopt, settings_here
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.programs.compiler import IS_DROPPED, compile_pool
from rrfp_jax.runtime.programs.library import phase_of
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages import leaves
from rrfp_jax.runtime.stages.staging import LastingPrograms


@dataclass(frozen=True)
class Ready:
    """Another split of an engine for which everything has been compiled."""

    engine: Engine
    ways: Sequence[leaves.LeafTransfer]
    tied: Sequence[leaves.LeafTransfer]
    programs: LastingPrograms


def compiled_for_split(
    engine: Engine, split: Sequence[int], rules: Sequence[StepRules], quiet: bool = False
) -> Ready:
    """Compile for another split what a started engine has compiled; each process for itself."""
    new = Engine(engine.spec, split, engine.executables)
    new.library.know(engine.library)
    if quiet:
        new.library.progress = silent
    found = leaves.transfers(engine.staging.leaves(), new.staging.leaves())
    leaves.check_widths(found, engine.layout.widths)
    with compile_pool() as pool:
        compiled = new.staging.compile(pool)
        for own in rules:
            new.library.prepare(engine.library.buckets(phase_of(own)), own)
        programs = compiled()
    return Ready(new, found, leaves.locate(new.library, new.chunks, new.layout), programs)


def recut(engine: Engine, ready: Ready, rules: Sequence[StepRules]) -> Engine:
    """The engine that goes on where a started one is; all processes together.

    Everybody has compiled first, and if that is refused the old one is as it was. Then it gives up what it
    has, and refuses to go on, even if that gets lost on its way: after an error of `Driver.exchange` neither
    can be used any more. The caller holds Ctrl-C meanwhile.
    """
    new = ready.engine
    new.library.progress = engine.library.progress
    for own in rules:  # what steps have met while the rest was compiled beside them
        new.library.prepare(engine.library.buckets(phase_of(own)), own)
    engine.world.gather("everybody to have compiled for another split", None, START_SECONDS)
    engine.world.recorder.enters("the move of layers to other stages")
    driver, held = engine.give_up()
    leaves.move(held, ready.ways, engine.layout, driver.exchange)
    made = new.staging.taking(ready.programs, held)
    new.run_on(driver, made, ready.tied, rules)
    new.stages = made.stages
    return new


class Compiling:
    """Compiles for another split beside the steps, on a thread; arguments as for `compiled_for_split`.

    The interpreter waits for that thread when it ends. So it begins no further program then, nor once it has
    been dropped; XLA cannot be interrupted, so those that it is at are finished.
    """

    def __init__(self, engine: Engine, split: Sequence[int], rules: Sequence[StepRules]) -> None:
        self._end: Future[Ready | str] = Future()
        dropped = threading.Event()
        # Nobody wants it any more: it ends with what it is at.
        self.drop = weakref.finalize(self, dropped.set)
        # Before it waits for the threads of pools, which would do all that they have been given.
        threading._register_atexit(dropped.set)  # type: ignore[attr-defined]  # nothing public comes as early
        threading.Thread(
            name="compiles for another split",
            target=_compile_all,
            args=(self._end, dropped.is_set, settings_here(), engine, split, rules),
        ).start()

    @property
    def told(self) -> tuple[bool, str]:
        """Whether it is over, and why it could not be compiled; empty if it could."""
        if not self._end.done():
            return False, ""
        found = self._end.result()
        return True, found if isinstance(found, str) else ""

    def ready(self) -> Ready:
        found = self._end.result()
        assert isinstance(found, Ready), "it is over, and there was no error"
        return found


def _compile_all(
    end: Future[Ready | str],
    is_dropped: Callable[[], bool],
    settings: Settings,
    engine: Engine,
    split: Sequence[int],
    rules: Sequence[StepRules],
) -> None:
    """Run a thread that compiles; only its text is kept of an error, as its traceback has the engine."""
    adopt(settings)  # JAX has some by thread
    IS_DROPPED.set(is_dropped)
    try:
        end.set_result(compiled_for_split(engine, split, rules, quiet=True))
    except Exception as error:  # whatever it is, training goes on without
        end.set_result(f"{type(error).__name__}: {error}")
