"""Another split of a Trainer's layers, before its first step or between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.resplit import Ready, compiled_for_split, recut
from rrfp_jax.runtime.run.signals import interrupts_held


def resplit(
    engine: Engine,
    split: Sequence[int],
    rules: Sequence[StepRules],
    take: Callable[[Engine], None],
    ready: Ready | None = None,
) -> None:
    """Go on with another split, unless the engine has it; all processes together.

    Args:
        engine: the old one.
        split: layers per virtual stage, in the model's order.
        rules: of steps that there may be, those that train first.
        take: is given what goes on, before a Ctrl-C that came meanwhile is raised.
        ready: what has been compiled for this split already; None to do so now.

    Raises:
        UsageError: the split does not add up, or layers cannot move so; nothing has changed.
        TrainingError: see `check_whole`; a process is gone, or nothing moves any more.
    """
    check_whole(engine)
    engine.world.agree("the split", str(split))
    if list(split) == engine.split:
        return
    if not engine.stages:
        new = Engine(engine.spec, split, engine.executables)
        new.library.know(engine.library)
        take(new)
        return
    ready = ready or compiled_for_split(engine, split, rules)
    with interrupts_held():  # all of it, or none
        take(recut(engine, ready, rules))


def check_whole(engine: Engine) -> None:
    """Refuse to begin anew without a word.

    Raises:
        TrainingError: layers were lost on their way to another split.
    """
    if engine.given_up:
        raise TrainingError(
            "layers were lost on their way to other stages: begin again, from a checkpoint if there is one"
        )
