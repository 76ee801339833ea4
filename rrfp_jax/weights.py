"""Initial parameters from files, for `Trainer(init=...)` or a config's `init()` (`docs/weights.md`)."""

from rrfp_jax.train.from_checkpoint import checkpoint, orbax
from rrfp_jax.train.pretrained import pretrained
from rrfp_jax.train.published import architecture, published, together
from rrfp_jax.train.stored import Tensor

__all__ = ["Tensor", "architecture", "checkpoint", "orbax", "pretrained", "published", "together"]
