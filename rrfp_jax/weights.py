"""Initial parameters from safetensors files, for `Trainer(init=...)`; see `docs/checkpoints.md`."""

from rrfp_jax.train.pretrained import Tensor, pretrained

__all__ = ["Tensor", "pretrained"]
