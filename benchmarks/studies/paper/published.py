"""What others have published: the sizes of the paper's models, and its iteration times.

**Models.** Sizes are those of the models' own configurations: GPT-3 Large (arXiv:2005.14165), Qwen3
(arXiv:2505.09388), Llama 3 (arXiv:2407.21783); ViT-H (arXiv:2010.11929), "ViT-Big" as OpenCLIP's ViT-bigG
(arXiv:2212.07143), "ViT-5B" as EVA-02-CLIP-E (arXiv:2303.15389), InternViT-6B (arXiv:2312.14238), ViT-22B
(arXiv:2302.05442). Which "Big" and which "5B" the paper means is our guess.

**Rows.** Section 7 of the paper: seconds of an iteration on RTX 4090 cards, parallelism as TP/PP/DP.

**Which rows are fitted was written down before anything was simulated**: `FITTED`, eight of the 20. All
columns of the 12 others are held out. The eight have every kind of row (language only and multimodal, TP 1
and 2, 8 to 64 stages), but none of LLaMA3-70B and none with replicas: these it has to find by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A row of equal transformer layers.

    Attributes:
        layers: how many.
        width: of the residual stream.
        hidden: width of the feed-forward part; `gated` if it has a third matrix (SwiGLU).
        heads, kv_heads, head_width: of attention.
        vocabulary: of the head that follows; 0 for none.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    gated: bool = False
    vocabulary: int = 0

    @property
    def layer_parameters(self) -> int:
        """Of one layer's matrices."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        return attention + (3 if self.gated else 2) * self.width * self.hidden


def _vision(layers: int, width: int, hidden: int, heads: int) -> Tower:
    head_width = width // heads
    return Tower(
        layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=heads, head_width=head_width
    )


def _llama(layers: int, width: int, hidden: int, heads: int, vocabulary: int) -> Tower:
    return Tower(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_width=128,
        gated=True,
        vocabulary=vocabulary,
    )


class Model(NamedTuple):
    """A language model, perhaps behind an encoder of images."""

    language: Tower
    vision: Tower | None


VIT_H = _vision(32, 1280, 5120, 16)
VIT_BIG = _vision(48, 1664, 8192, 16)
VISION: Mapping[str, Tower] = {
    "ViT-L": _vision(24, 1024, 4096, 16),
    "ViT-H": VIT_H,
    "ViT-g": _vision(40, 1408, 6144, 16),
    "ViT-Big": VIT_BIG,
    "ViT-5B": _vision(64, 1792, 15360, 16),
    "InternViT": _vision(48, 3200, 12800, 25),
    "ViT-22B": _vision(48, 6144, 24576, 48),
}
LANGUAGE: Mapping[str, Tower] = {
    "GPT3-Large": Tower(
        layers=24, width=1536, hidden=6144, heads=16, kv_heads=16, head_width=96, vocabulary=50257
    ),
    "Qwen3-1.7B": _llama(28, 2048, 6144, 16, 151936),
    "Qwen3-4B": _llama(36, 2560, 9728, 32, 151936),
    "LLaMA3-8B": _llama(32, 4096, 14336, 32, 128256),
    "Qwen3-32B": _llama(64, 5120, 25600, 64, 151936),
    "LLaMA3-70B": _llama(80, 8192, 28672, 64, 128256),
}


def model(name: str) -> Model:
    """By the paper's name, such as "Qwen3-4B + ViT-Big"."""
    language, _, vision = name.partition(" + ")
    return Model(LANGUAGE[language], VISION[vision] if vision else None)


SCHEDULES = ("1F1B", "ZB", "BF", "BFW")


class Row(NamedTuple):
    """A row of the paper's main table.

    Attributes:
        model: its name there.
        tp, pp, dp: parallelism.
        batch: samples of an iteration, over all replicas.
        seconds: of an iteration, in the order of `SCHEDULES`.
    """

    model: str
    tp: int
    pp: int
    dp: int
    batch: int
    seconds: tuple[float, float, float, float]

    @property
    def name(self) -> str:
        """Such as "GPT3-Large 1/8/1"."""
        return f"{self.model} {self.tp}/{self.pp}/{self.dp}"


ROWS = (
    Row("GPT3-Large", 1, 8, 1, 64, (3.28, 2.97, 2.29, 2.10)),
    Row("GPT3-Large", 1, 16, 1, 64, (2.09, 1.74, 1.26, 1.18)),
    Row("GPT3-Large", 2, 8, 1, 64, (3.66, 3.27, 3.03, 2.81)),
    Row("GPT3-Large", 2, 16, 1, 64, (2.34, 2.03, 1.63, 1.57)),
    Row("Qwen3-1.7B + ViT-H", 1, 8, 1, 192, (11.49, 9.91, 5.98, 5.68)),
    Row("Qwen3-1.7B + ViT-H", 1, 16, 1, 192, (9.04, 7.40, 4.50, 4.33)),
    Row("Qwen3-1.7B + ViT-H", 2, 8, 1, 192, (12.94, 11.86, 7.66, 7.41)),
    Row("Qwen3-1.7B + ViT-H", 2, 16, 1, 192, (12.54, 11.95, 7.07, 6.74)),
    Row("Qwen3-4B + ViT-Big", 1, 8, 1, 192, (14.05, 12.61, 7.84, 7.52)),
    Row("Qwen3-4B + ViT-Big", 1, 16, 1, 192, (11.01, 9.98, 5.02, 4.81)),
    Row("Qwen3-4B + ViT-Big", 2, 8, 1, 96, (7.19, 6.60, 4.45, 4.19)),
    Row("Qwen3-4B + ViT-Big", 2, 16, 1, 96, (6.29, 5.99, 2.94, 2.81)),
    Row("LLaMA3-8B + ViT-5B", 1, 32, 1, 64, (7.62, 6.58, 3.38, 2.75)),
    Row("LLaMA3-8B + ViT-5B", 2, 16, 1, 64, (8.30, 7.84, 3.52, 3.04)),
    Row("LLaMA3-8B + ViT-5B", 2, 8, 2, 64, (4.90, 4.44, 3.02, 2.77)),
    Row("Qwen3-32B + InternViT", 1, 64, 1, 64, (8.03, 7.35, 4.46, 4.37)),
    Row("Qwen3-32B + InternViT", 2, 32, 1, 64, (8.39, 7.66, 5.19, 4.66)),
    Row("Qwen3-32B + InternViT", 2, 16, 2, 64, (5.14, 4.90, 4.06, 3.74)),
    Row("LLaMA3-70B + ViT-22B", 2, 64, 1, 64, (8.72, 7.94, 5.16, 4.76)),
    Row("LLaMA3-70B + ViT-22B", 2, 32, 2, 64, (7.23, 6.67, 4.71, 4.63)),
)

FITTED = frozenset(
    {
        "GPT3-Large 1/8/1",
        "GPT3-Large 2/16/1",
        "Qwen3-1.7B + ViT-H 1/16/1",
        "Qwen3-1.7B + ViT-H 2/8/1",
        "Qwen3-4B + ViT-Big 1/8/1",
        "Qwen3-4B + ViT-Big 2/16/1",
        "LLaMA3-8B + ViT-5B 2/16/1",
        "Qwen3-32B + InternViT 1/64/1",
    }
)
