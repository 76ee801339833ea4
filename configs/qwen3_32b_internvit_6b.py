"""Qwen3-32B (its config.json at huggingface.co/Qwen) behind InternViT-6B (arXiv:2312.14238, table 1)."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

import rrfp_jax as rrfp
from configs.qwen3_4b import get_config as qwen3_4b
from configs.vision_language import VisionLanguage
from models import vlm


def get_config() -> VisionLanguage:
    """38.8 G parameters: 5.9 in the encoder, 32.8 in the decoder; 448 x 448 pixels, 2 x 2 patches a token."""
    return VisionLanguage(
        name="qwen3_32b_internvit_6b",
        steps=100,
        mesh=rrfp.Mesh(pp=32),
        clip_norm=1.0,
        remat="full",
        model=vlm.VLMConfig(
            merge=2,
            decoder=replace(
                qwen3_4b().model,
                d_model=5120,
                n_layers=64,
                n_heads=64,
                d_ff=25600,
                param_dtype=jnp.bfloat16,
            ),
            encoder=vlm.EncoderConfig(
                d_model=3200,
                n_layers=48,
                n_heads=25,
                n_kv_heads=25,
                head_size=128,
                d_ff=12800,
                norm="rms",
                qk_norm=True,
                patch_size=14,
                grid=(32, 32),
                param_dtype=jnp.bfloat16,
            ),
        ),
    )
