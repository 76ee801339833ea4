"""Layers of published models, with the sources of their sizes.

Left out because they cost next to nothing: layer scales, dropout, biases of normalisations; where some matrix
products have biases, all have them here. ViT-5B, which arXiv:2605.18750 uses, is left out because no
publication of its sizes was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu.transformer import Sizes

GPT3_LARGE = Sizes(
    model="GPT3-Large",
    source="arXiv:2005.14165, table 2.1",
    causal=True,
    layers=24,
    width=1536,
    heads=16,
    kv_heads=16,
    head_size=96,
    hidden=6144,
    tokens=2048,
)

QWEN3_1_7B = Sizes(
    model="Qwen3-1.7B",
    source="https://huggingface.co/Qwen/Qwen3-1.7B, config.json",
    causal=True,
    layers=28,
    width=2048,
    heads=16,
    kv_heads=8,
    head_size=128,
    hidden=6144,
    tokens=32768,
    norm="rms",
    gated=True,
    biases=False,
    qk_norm=True,
    rotary=True,
)

QWEN3_4B = replace(
    QWEN3_1_7B,
    model="Qwen3-4B",
    source="https://huggingface.co/Qwen/Qwen3-4B, config.json",
    layers=36,
    width=2560,
    heads=32,
    hidden=9728,
)

LLAMA3_8B = replace(
    QWEN3_1_7B,
    model="LLaMA3-8B",
    source="https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json; arXiv:2407.21783, table 3",
    layers=32,
    width=4096,
    heads=32,
    hidden=14336,
    tokens=8192,
    qk_norm=False,
)

VIT_H = Sizes(
    model="ViT-H/14",
    source="arXiv:2010.11929, table 1; open_clip, model_configs/ViT-H-14.json",
    causal=False,
    layers=32,
    width=1280,
    heads=16,
    kv_heads=16,
    head_size=80,
    hidden=5120,
    tokens=257,  # 224 x 224 pixels in patches of 14 x 14, and the class token
)

VIT_G = replace(
    VIT_H,
    model="ViT-g/14",
    source="arXiv:2106.04560, table 2; open_clip, model_configs/ViT-g-14.json",
    layers=40,
    width=1408,
    head_size=88,
    hidden=6144,
)

VIT_BIG_G = replace(
    VIT_H,
    model="ViT-bigG/14",
    source="arXiv:2106.04560, table 2 (ViT-G); open_clip, model_configs/ViT-bigG-14.json",
    layers=48,
    width=1664,
    head_size=104,
    hidden=8192,
)

INTERN_VIT_6B = Sizes(
    model="InternViT-6B",
    source="https://huggingface.co/OpenGVLab/InternViT-6B-448px-V1-5, config.json",
    causal=False,
    layers=45,
    width=3200,
    heads=25,
    kv_heads=25,
    head_size=128,
    hidden=12800,
    tokens=1025,  # 448 x 448 pixels in patches of 14 x 14, and the class token
    norm="rms",
    qk_norm=True,
)

VIT_22B = replace(
    VIT_H,
    model="ViT-22B/14",
    source="arXiv:2302.05442, table 1",
    layers=48,
    width=6144,
    heads=48,
    kv_heads=48,
    head_size=128,
    hidden=24576,
    tokens=256,  # no class token
    qk_norm=True,
    parallel=True,
)

DECODERS: Sequence[Sizes] = (GPT3_LARGE, QWEN3_1_7B, QWEN3_4B, LLAMA3_8B)
ENCODERS: Sequence[Sizes] = (VIT_H, VIT_G, VIT_BIG_G, INTERN_VIT_6B, VIT_22B)

TINY_DECODER = replace(
    QWEN3_1_7B,
    model="tiny decoder",
    source="made up",
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    head_size=8,
    hidden=32,
    tokens=16,
)

TINY_ENCODER = replace(
    VIT_22B,
    model="tiny encoder",
    source="made up",
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    head_size=8,
    hidden=32,
    tokens=5,
)
