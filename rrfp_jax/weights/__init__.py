"""Initial parameters from files, for `Trainer(init=...)` or a config's `init()` (`docs/weights.md`).

Names are imported when they are first used, so that `rrfp export --help` does without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_jax.weights.checkpoints import checkpoint, orbax
    from rrfp_jax.weights.published_models import architecture, published, together
    from rrfp_jax.weights.tensors import Tensor, pretrained

__all__ = ["Tensor", "architecture", "checkpoint", "orbax", "pretrained", "published", "together"]

_MODULES = {
    "checkpoints": ["checkpoint", "orbax"],
    "published_models": ["architecture", "published", "together"],
    "tensors": ["Tensor", "pretrained"],
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = found = getattr(import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
