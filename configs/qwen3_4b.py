"""Qwen3-4B (its config.json at huggingface.co/Qwen/Qwen3-4B), on random tokens."""

from __future__ import annotations

import rrfp_jax as rrfp
from configs.decoders import Decoder
from models import decoder


def get_config() -> Decoder:
    """4.0 G parameters; normed queries and keys, tied embedding."""
    return Decoder(
        name="qwen3_4b",
        steps=100,
        mesh=rrfp.Mesh(pp=8),
        clip_norm=1.0,
        tied=True,
        remat="full",
        sequence_length=4096,
        model=decoder.DecoderConfig(
            d_model=2560,
            n_layers=36,
            n_heads=32,
            n_kv_heads=8,
            head_size=128,
            d_ff=9728,
            vocab_size=151936,
            norm_epsilon=1e-6,
            qk_norm=True,
            rope_base=1e6,
        ),
    )
