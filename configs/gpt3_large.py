"""GPT-3 Large (arXiv:2005.14165, table 2.1), on random tokens."""

from __future__ import annotations

import rrfp_jax as rrfp
from configs.decoders import Decoder
from models import decoder


def get_config() -> Decoder:
    """760 M parameters; LayerNorm, GELU, learned positions, tied embedding."""
    return Decoder(
        name="gpt3_large",
        steps=100,
        mesh=rrfp.Mesh(pp=4),
        clip_norm=1.0,
        tied=True,
        batch=2,
        model=decoder.DecoderConfig(
            d_model=1536,
            n_layers=24,
            n_heads=16,
            n_kv_heads=16,
            head_size=96,
            d_ff=6144,
            vocab_size=50257,
            norm="layer",
            gated=False,
            biases=True,
            positions="learned",
            max_length=2048,
        ),
    )
