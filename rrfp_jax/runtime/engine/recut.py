"""Another split between two steps: layers move to other stages, device to device."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.processes.interrupts import interrupts_held
from rrfp_jax.runtime.processes.world import START_SECONDS
from rrfp_jax.runtime.programs.compiling import compile_pool
from rrfp_jax.runtime.programs.library import phase_of
from rrfp_jax.runtime.stages import moving, ties


def recut(engine: Engine, split: Sequence[int], rules: Sequence[StepRules]) -> Engine:
    """An engine with another split that goes on where a started one is; all processes together.

    Everybody compiles first, and if that is refused the old one is as it was. Then it gives up what it has,
    and refuses to go on, even if that gets lost on its way.

    Args:
        engine: the old one, between two steps, with no gradients.
        split: layers per virtual stage, in the model's order.
        rules: of steps that there may be, those that train first.

    Raises:
        UsageError: see `Engine` and `moving.check_widths`, or the optimizer does not take it.
        PeerLost, TrainingError: see `exchange`; neither can be used any more.
    """
    new = Engine(engine.setup, split, engine.executables)
    new.library.know(engine.library)
    found = moving.ways(engine.staging.naming.leaves(), new.staging.naming.leaves())
    moving.check_widths(found, engine.layout.widths)
    tied = ties.locate(new.library, new.chunks, new.layout)
    with compile_pool() as pool:
        finish = new.staging.begin_again(pool)
        for own in rules:
            new.library.prepare(engine.library.buckets(phase_of(own)), own)
        make = finish()
    engine.world.gather("everybody to have compiled for another split", None, START_SECONDS)
    engine.world.recorder.board.enters("the move of layers to other stages")
    with interrupts_held():  # all of it, or none
        links, held = engine.give_up()
        moving.move(held, found, engine.layout, links.exchange)
        made = make(held)
        new.run_on(links, made, tied, rules)
        new.stages = made.stages
    return new
