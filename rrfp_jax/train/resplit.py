"""Another split of a Trainer's layers, before its first step or between two."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.recut import Ready, compiled_for_split, recut


def resplit(
    engine: Engine, split: Sequence[int], rules: Sequence[StepRules], ready: Ready | None = None
) -> Engine:
    """What goes on with another split: the engine itself if it has it; all processes together.

    Args:
        engine: the old one.
        split: layers per virtual stage, in the model's order.
        rules: of steps that there may be, those that train first.
        ready: what has been compiled for this split already; None to do so now.

    Raises:
        UsageError: the split does not add up, or layers cannot move so; nothing has changed.
        TrainingError: see `check_whole`; a process is gone, or nothing moves any more.
    """
    check_whole(engine)
    engine.world.agree("the split", str(split))
    if list(split) == engine.split:
        return engine
    if engine.stages:
        return recut(engine, ready or compiled_for_split(engine, split, rules), rules)
    new = Engine(engine.setup, split, engine.executables)
    new.library.know(engine.library)
    return new


def check_whole(engine: Engine) -> None:
    """Refuse to begin anew without a word.

    Raises:
        TrainingError: layers were lost on their way to another split.
    """
    if engine.given_up:
        raise TrainingError(
            "layers were lost on their way to other stages: begin again, from a checkpoint if there is one"
        )
