"""Mixtral 8x7B (arXiv:2401.04088, table 1; its config.json at huggingface.co/mistralai), on random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from configs.decoders import Decoder
from models import moe


class RoutedBlock(moe.Block):
    """Its balance is a term of the loss; reported: the term, and the share of choices without a slot."""

    def __call__(  # type: ignore[override]
        self, carry: jax.Array, mb: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, rrfp.Loss]:
        """The stream, and the term."""
        x, balance = super().__call__(carry, mb)
        dropped = rrfp.Mean(balance.dropped, balance.choices)
        return x, rrfp.Loss(balance.term, metrics={"balance": balance.term, "dropped": dropped})


@dataclass(frozen=True, kw_only=True)
class Routed(Decoder):
    """A published decoder with routed experts; with `mesh.tp` a stage's devices share experts and heads."""

    model: moe.RoutedConfig

    def pipeline(self) -> rrfp.Pipeline:
        """Embedding, blocks, head."""
        return self.pipeline_of(RoutedBlock, EXPERTS)


EXPERTS = {
    "*.query.kernel": P(None, "tp"),
    "*.out.kernel": P("tp", None),
    **{f"*.experts.{name}": P("tp") for name in ("up", "gate", "down")},
    "*.tokens.embedding": P("tp", None),
}
"""Each device has some of the experts whole; attention, embedding and head as in `configs/sharded.py`."""


def get_config() -> Routed:
    """46.7 G parameters, of which a token uses 12.9; a block a stage; experts have 1.25 times even slots."""
    return Routed(
        name="mixtral_8x7b",
        steps=100,
        mesh=rrfp.Mesh(pp=34),
        clip_norm=1.0,
        remat="full",
        sequence_length=4096,
        microbatches=136,
        model=moe.RoutedConfig(
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            head_size=128,
            d_ff=14336,
            vocab_size=32000,
            rope_base=1e6,
            n_experts=8,
            capacity=1.25,
            balance=0.02,
            param_dtype=jnp.bfloat16,
        ),
    )
