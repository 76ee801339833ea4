"""Two stages of two devices each, in two replicas: a small decoder on the quickstart's data."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from configs import quickstart
from models import decoder


@dataclass(frozen=True, kw_only=True)
class Sharded(quickstart.Quickstart):
    """0.8 M parameters."""

    model: decoder.DecoderConfig  # type: ignore[assignment]

    def pipeline(self) -> rrfp.Pipeline:
        """The decoder; sequences are spread over a stage's devices between blocks of different stages."""
        layers = [
            rrfp.layer(decoder.Embed, self.model),
            rrfp.layer(decoder.Block, self.model, repeat=self.model.n_layers),
            rrfp.layer(decoder.Head, self.model),
        ]
        return rrfp.Pipeline(layers, quickstart.loss, sharding=tensors(self.model), carry=SEQUENCES)


SEQUENCES = P(None, "tp")
"""Of what stages send to each other: each device of a stage sends its part of the sequences."""


def tensors(model: decoder.BlocksConfig) -> dict[str, P]:
    """How the devices of a stage share a transformer's parameters (arXiv:1909.08053).

    Columns, then rows: one sum over the devices after attention, one after the MLP. Norms, and the few heads
    of keys and values, are whole on every device.
    """
    columns = ["query", "up", *(["gate"] if model.gated else [])]  # heads; channels inside the MLP
    return {
        **{f"*.{name}.kernel": P(None, "tp") for name in columns},
        **{f"*.{name}.bias": P("tp") for name in columns if model.biases},
        **{f"*.{name}.kernel": P("tp", None) for name in ("out", "down")},
        "*.tokens.embedding": P("tp", None),  # vocabulary
    }


def get_config() -> Sharded:
    """Eight processes with a device each, unless `-n` says fewer."""
    return Sharded(
        name="sharded",
        steps=30,
        schedule="bfw",
        mesh=rrfp.Mesh(pp=2, tp=2, dp=2),
        model=decoder.DecoderConfig(
            d_model=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            head_size=32,
            d_ff=384,
            vocab_size=256,
            dtype=jnp.float32,
        ),
    )
