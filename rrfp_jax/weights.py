"""Initial parameters from files, for `Trainer(init=...)` or a config's `init()` (`docs/export.md`)."""

from rrfp_jax.train.from_checkpoint import checkpoint, orbax
from rrfp_jax.train.pretrained import pretrained
from rrfp_jax.train.stored import Tensor

__all__ = ["Tensor", "checkpoint", "orbax", "pretrained"]
