"""rrfp_jax: readiness-driven pipeline-parallel training for JAX. A schedule is only a hint.

Names are imported when they are first used, so that the core, the simulator and the commands' --help do
without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rrfp_jax.runtime.run.stacks import look_on
from rrfp_jax.tracebacks import hide_frames

if TYPE_CHECKING:
    from rrfp_jax import data, loggers, schedules, weights
    from rrfp_jax.commands.simulation import simulate
    from rrfp_jax.data.contract import Microbatch
    from rrfp_jax.errors import TrainingError, UsageError
    from rrfp_jax.report.timeline import compare
    from rrfp_jax.runs.config import Checkpointing, RunConfig
    from rrfp_jax.runtime.engine.settings import Settings
    from rrfp_jax.runtime.mesh.topology import Mesh
    from rrfp_jax.runtime.model.layers import EvaluationBatch, layer
    from rrfp_jax.runtime.model.metrics import Loss, Max, Mean, Sum
    from rrfp_jax.runtime.model.pipeline import Pipeline
    from rrfp_jax.train.exporting import export
    from rrfp_jax.train.join import join
    from rrfp_jax.train.trainer import Trainer

__all__ = [
    "Checkpointing",
    "EvaluationBatch",
    "Loss",
    "Max",
    "Mean",
    "Mesh",
    "Microbatch",
    "Pipeline",
    "RunConfig",
    "Settings",
    "Sum",
    "Trainer",
    "TrainingError",
    "UsageError",
    "compare",
    "data",
    "export",
    "join",
    "layer",
    "loggers",
    "schedules",
    "simulate",
    "weights",
]

_MODULES = {
    "Checkpointing": "runs.config",
    "EvaluationBatch": "runtime.model.layers",
    "Loss": "runtime.model.metrics",
    "Max": "runtime.model.metrics",
    "Mean": "runtime.model.metrics",
    "Mesh": "runtime.mesh.topology",
    "Microbatch": "data.contract",
    "Pipeline": "runtime.model.pipeline",
    "RunConfig": "runs.config",
    "Settings": "runtime.engine.settings",
    "Sum": "runtime.model.metrics",
    "Trainer": "train.trainer",
    "TrainingError": "errors",
    "UsageError": "errors",
    "compare": "report.timeline",
    "export": "train.exporting",
    "join": "train.join",
    "layer": "runtime.model.layers",
    "simulate": "commands.simulation",
}
"""Where each name is defined; `data`, `loggers`, `schedules` and `weights` are modules themselves."""

look_on()
hide_frames()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("rrfp_jax")
    if name not in __all__:
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name) if name in _MODULES else None
    found = import_module(f"{__name__}.{name}") if found is None else found
    globals()[name] = found  # asked once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
