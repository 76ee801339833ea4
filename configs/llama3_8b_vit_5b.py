"""LLaMA3-8B (arXiv:2407.21783, table 3) behind EVA-02-CLIP-E's encoder (arXiv:2303.15389), on random data."""

from __future__ import annotations

import rrfp_jax as rrfp
from configs.vision_language import VisionLanguage
from models import decoder, vlm


def get_config() -> VisionLanguage:
    """12.4 G parameters: 4.3 in the encoder, 8.0 in the decoder; images of 224 x 224 pixels."""
    return VisionLanguage(
        name="llama3_8b_vit_5b",
        steps=100,
        mesh=rrfp.Mesh(pp=16),
        clip_norm=1.0,
        remat="full",
        model=vlm.VLMConfig(
            decoder=decoder.DecoderConfig(
                d_model=4096,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                head_size=128,
                d_ff=14336,
                vocab_size=128256,
                rope_base=500_000.0,
            ),
            encoder=vlm.EncoderConfig(
                d_model=1792,
                n_layers=64,
                n_heads=16,
                n_kv_heads=16,
                head_size=112,
                d_ff=15360,
                patch_size=14,
                grid=(16, 16),
            ),
        ),
    )
