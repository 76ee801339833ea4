"""LLaMA3-70B (arXiv:2407.21783, table 3), on random tokens."""

from __future__ import annotations

import jax.numpy as jnp

import rrfp_jax as rrfp
from configs.decoders import Decoder
from models import decoder


def get_config() -> Decoder:
    """70.6 G parameters; two layers a stage, embedding and head with one block each; rematerialised."""
    return Decoder(
        name="llama3_70b",
        steps=100,
        mesh=rrfp.Mesh(pp=41),
        clip_norm=1.0,
        remat="full",
        microbatches=160,
        spread_sequences=True,
        model=decoder.DecoderConfig(
            d_model=8192,
            n_layers=80,
            n_heads=64,
            n_kv_heads=8,
            head_size=128,
            d_ff=28672,
            vocab_size=128256,
            rope_base=500_000.0,
            param_dtype=jnp.bfloat16,
        ),
    )
