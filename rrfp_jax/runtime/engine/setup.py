"""What an engine is made of, besides the split of the layers, which may change between steps."""

from __future__ import annotations

from dataclasses import dataclass

import optax

from rrfp_jax.core.tasks import Placement
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.settings import Execution, MemoryPolicy


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is made of.

    Attributes:
        pipe: the model.
        layout: where the stages are; an engine has those of its process.
        placement: which stage has which virtual stages of the model.
        optimizer: None if the model is never updated.
        init: initial values from elsewhere, per leaf.
        seed, halves: of initial values and random keys; whether all backwards run as I and W.
        memory, execution: settings of the run.
    """

    pipe: Pipeline
    layout: Layout
    placement: Placement
    optimizer: optax.GradientTransformation | None
    init: InitFunction | None
    seed: int
    halves: bool
    memory: MemoryPolicy
    execution: Execution
