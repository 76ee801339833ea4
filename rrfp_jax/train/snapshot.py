"""What a checkpoint holds of this process's stages, and putting it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.stage import Stage
from rrfp_jax.train.checkpointfolder import RunState
from rrfp_jax.train.leaves import Key, filled, keyed
from rrfp_jax.train.lossscale import LossScale
from rrfp_jax.train.nonfinite import Standing

PARAMETERS, OPTIMIZER = "params", "optimizer"


def leaves_of(stages: Iterable[Stage]) -> list[tuple[Key, jax.Array]]:
    """All arrays that an update changes, by layer and parameter; see `leaves.Key`."""
    return [
        pair
        for stage in stages
        for name, tree in ((PARAMETERS, stage.params), (OPTIMIZER, stage.optimizer_state))
        for pair in keyed(tree, name)
    ]


def put_back(stages: Iterable[Stage], leaves: Mapping[Key, np.ndarray[Any, Any]]) -> None:
    """Give the stages what `leaves_of` had found."""
    for stage in stages:
        stage.replace(
            filled(stage.params, leaves, PARAMETERS), filled(stage.optimizer_state, leaves, OPTIMIZER)
        )


def state_of(step: int, seed: int, standing: Standing, plan: str, config: Any) -> RunState:
    """What a run needs besides; the position in the data is the number of the next step."""
    return RunState(step=step, data=step, seed=seed, standing=asdict(standing), plan_hash=plan, config=config)


def standing_of(run: RunState, seed: int) -> Standing:
    """How training stood.

    Raises:
        UsageError: the run had another seed.
    """
    if run.seed != seed:
        raise UsageError(
            f"seed={seed}: the checkpoint of step {run.step} is of a run with seed={run.seed}, whose random "
            f"keys and data order follow from it; give that one"
        )
    return Standing(**{**run.standing, "loss_scale": LossScale(**run.standing["loss_scale"])})
