"""Hyperparameters that a checkpoint has in the optimizer's state, where others were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine

Numbers: TypeAlias = Mapping[str, float]


def kept_numbers(engine: Engine) -> Numbers:
    """Those of this process that no schedule gives; empty where another process tells them."""
    return {
        name: value
        for optimizer in engine.optimizers
        if optimizer.hyperparams is not None
        for name, value in optimizer.hyperparams.kept_numbers(optimizer.state).items()
    }


def say_which_count(engine: Engine, asked: Numbers) -> None:
    """Say which numbers of the checkpoint count instead of those that the optimizer was made with.

    All processes together, after a checkpoint has been put back.

    Args:
        engine: with the restored state.
        asked: what `kept_numbers` gave before.
    """
    now = kept_numbers(engine)
    mine = [[name, asked[name], now[name]] for name in now if now[name] != asked[name]]
    for told in engine.world.gather("the optimizer's restored numbers", mine):
        for name, new, old in told if engine.world.rank == 0 else ():
            say(
                f"{name} stays {old:g}, as the checkpoint has it in the optimizer's state; {new:g} was asked "
                f"for. To change it, give a schedule: {name}=optax.constant_schedule({new:g})",
            )
