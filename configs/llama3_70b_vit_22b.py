"""LLaMA3-70B (arXiv:2407.21783, table 3) behind ViT-22B (arXiv:2302.05442, table 1), on random data."""

from __future__ import annotations

import jax.numpy as jnp

import rrfp_jax as rrfp
from configs.llama3_70b import get_config as llama3_70b
from configs.vision_language import VisionLanguage
from models import vlm


def get_config() -> VisionLanguage:
    """92.4 G parameters: 21.7 in the encoder, 70.6 in the decoder; images of 224 x 224 pixels."""
    return VisionLanguage(
        name="llama3_70b_vit_22b",
        steps=100,
        mesh=rrfp.Mesh(pp=64),
        clip_norm=1.0,
        remat="full",
        microbatches=128,
        model=vlm.VLMConfig(
            decoder=llama3_70b().model,
            encoder=vlm.EncoderConfig(
                d_model=6144,
                n_layers=48,
                n_heads=48,
                n_kv_heads=48,
                head_size=128,
                d_ff=24576,
                qk_norm=True,
                parallel=True,
                patch_size=14,
                grid=(16, 16),
                param_dtype=jnp.bfloat16,
            ),
        ),
    )
