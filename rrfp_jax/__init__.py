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
    "commands.simulation": ["simulate"],
    "data.contract": ["Microbatch"],
    "errors": ["TrainingError", "UsageError"],
    "report.timeline": ["compare"],
    "runs.config": ["Checkpointing", "RunConfig"],
    "runtime.engine.settings": ["Settings"],
    "runtime.mesh.topology": ["Mesh"],
    "runtime.model.layers": ["EvaluationBatch", "layer"],
    "runtime.model.metrics": ["Loss", "Max", "Mean", "Sum"],
    "runtime.model.pipeline": ["Pipeline"],
    "train.exporting": ["export"],
    "train.join": ["join"],
    "train.trainer": ["Trainer"],
}
"""Which names each module defines; `data`, `loggers`, `schedules` and `weights` are modules themselves."""

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
    module = next((own for own, names in _MODULES.items() if name in names), name)
    found = import_module(f"{__name__}.{module}")
    globals()[name] = found = found if module == name else getattr(found, name)  # asked once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
