"""Qwen3-4B behind ViT-bigG/14 (arXiv:2212.07143), on random images and tokens."""

from __future__ import annotations

import rrfp_jax as rrfp
from configs.qwen3_4b import get_config as qwen3_4b
from configs.vision_language import VisionLanguage
from models import vlm


def get_config() -> VisionLanguage:
    """5.9 G parameters: 1.8 in the encoder, 4.0 in the decoder; images of 224 x 224 pixels."""
    return VisionLanguage(
        name="qwen3_4b_vit_bigg",
        steps=100,
        mesh=rrfp.Mesh(pp=8),
        clip_norm=1.0,
        tied=True,
        remat="full",
        model=vlm.VLMConfig(
            decoder=qwen3_4b().model,
            encoder=vlm.EncoderConfig(
                d_model=1664,
                n_layers=48,
                n_heads=16,
                n_kv_heads=16,
                head_size=104,
                d_ff=8192,
                patch_size=14,
                grid=(16, 16),
            ),
        ),
    )
