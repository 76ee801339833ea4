"""Layers of published models, with the sources of their sizes.

Left out because they cost next to nothing: layer scales and dropout. Where some matrix products have biases,
all have them here. ViT-5B, which arXiv:2605.18750 uses, is left out: no publication of its sizes was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs import gpt3_large, llama3_8b_vit_5b, qwen3_4b
from models.decoder import DecoderConfig

NO_VOCABULARY = 1
"""Embeddings and heads are not among the layers."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model of which one layer is measured.

    Attributes:
        name: of the model.
        source: of its sizes.
        tokens: of one image with its class token (encoders); of the longest sequence (decoders).
        model: its sizes; bfloat16 on float32 parameters.
    """

    name: str
    source: str
    tokens: int
    model: DecoderConfig

    def changed(self, name: str, source: str, *, tokens: int | None = None, **sizes: object) -> Published:
        model = replace(self.model, **sizes)  # type: ignore[arg-type]
        return Published(name=name, source=source, tokens=tokens or self.tokens, model=model)


GPT3_LARGE = Published(
    name="GPT3-Large",
    source="arXiv:2005.14165, table 2.1",
    tokens=2048,
    model=gpt3_large.get_config().model,
)

QWEN3_4B = Published(
    name="Qwen3-4B",
    source="https://huggingface.co/Qwen/Qwen3-4B, config.json",
    tokens=32768,
    model=qwen3_4b.get_config().model,
)

QWEN3_1_7B = QWEN3_4B.changed(
    "Qwen3-1.7B",
    "https://huggingface.co/Qwen/Qwen3-1.7B, config.json",
    n_layers=28,
    d_model=2048,
    n_heads=16,
    d_ff=6144,
)

LLAMA3_8B = Published(
    name="LLaMA3-8B",
    source="https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json; arXiv:2407.21783, table 3",
    tokens=8192,
    model=llama3_8b_vit_5b.get_config().model.decoder,
)

VIT_H = Published(
    name="ViT-H/14",
    source="arXiv:2010.11929, table 1; open_clip, model_configs/ViT-H-14.json",
    tokens=257,  # 224 x 224 pixels in patches of 14 x 14, and the class token
    model=DecoderConfig(
        n_layers=32,
        d_model=1280,
        n_heads=16,
        n_kv_heads=16,
        head_size=80,
        d_ff=5120,
        vocab_size=NO_VOCABULARY,
        norm="layer",
        gated=False,
        biases=True,
        positions="learned",
        max_length=257,
        causal=False,
        attention="xla",
    ),
)

VIT_G = VIT_H.changed(
    "ViT-g/14",
    "arXiv:2106.04560, table 2; open_clip, model_configs/ViT-g-14.json",
    n_layers=40,
    d_model=1408,
    head_size=88,
    d_ff=6144,
)

VIT_BIG_G = VIT_H.changed(
    "ViT-bigG/14",
    "arXiv:2106.04560, table 2 (ViT-G); open_clip, model_configs/ViT-bigG-14.json",
    n_layers=48,
    d_model=1664,
    head_size=104,
    d_ff=8192,
)

INTERN_VIT_6B = VIT_H.changed(
    "InternViT-6B",
    "https://huggingface.co/OpenGVLab/InternViT-6B-448px-V1-5, config.json",
    tokens=1025,  # 448 x 448 pixels in patches of 14 x 14, and the class token
    n_layers=45,
    d_model=3200,
    n_heads=25,
    n_kv_heads=25,
    head_size=128,
    d_ff=12800,
    norm="rms",
    qk_norm=True,
)

VIT_22B = VIT_H.changed(
    "ViT-22B/14",
    "arXiv:2302.05442, table 1",
    tokens=256,  # no class token
    n_layers=48,
    d_model=6144,
    n_heads=48,
    n_kv_heads=48,
    head_size=128,
    d_ff=24576,
    qk_norm=True,
    parallel=True,
)

DECODERS: Sequence[Published] = (GPT3_LARGE, QWEN3_1_7B, QWEN3_4B, LLAMA3_8B)
ENCODERS: Sequence[Published] = (VIT_H, VIT_G, VIT_BIG_G, INTERN_VIT_6B, VIT_22B)

TINY_DECODER = QWEN3_4B.changed(
    "tiny decoder",
    "made up",
    tokens=16,
    n_layers=2,
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    head_size=8,
    d_ff=32,
)

TINY_ENCODER = VIT_22B.changed(
    "tiny encoder",
    "made up",
    tokens=5,
    n_layers=2,
    d_model=16,
    n_heads=2,
    n_kv_heads=2,
    head_size=8,
    d_ff=32,
)
