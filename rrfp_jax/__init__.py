"""rrfp_jax: readiness-driven pipeline-parallel training for JAX. A schedule is only a hint."""

from rrfp_jax import data, schedules
from rrfp_jax.commands.simulation import simulate
from rrfp_jax.data.contract import Microbatch
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.layers import Loss, layer
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.train.trainer import Trainer

__all__ = [
    "Loss",
    "Mesh",
    "Microbatch",
    "Pipeline",
    "RunConfig",
    "Trainer",
    "TrainingError",
    "UsageError",
    "data",
    "layer",
    "schedules",
    "simulate",
]
