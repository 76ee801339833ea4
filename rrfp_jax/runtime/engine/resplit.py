"""Another split between two steps: layers move to other stages, device to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.progress import silent
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.programs.compiler import compile_pool
from rrfp_jax.runtime.programs.library import phase_of
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages import leaves
from rrfp_jax.runtime.stages.staging import LastingPrograms


class Ready(NamedTuple):
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
