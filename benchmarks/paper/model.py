"""The paper's rows (arXiv:2605.18750) as workloads: published sizes, assumptions, three fitted numbers.

**Models.** Sizes are those of the models' own configurations: GPT-3 Large (arXiv:2005.14165), Qwen3
(arXiv:2505.09388), Llama 3 (arXiv:2407.21783); ViT-H (arXiv:2010.11929), "ViT-Big" as OpenCLIP's ViT-bigG
(arXiv:2212.07143), "ViT-5B" as EVA-02-CLIP-E (arXiv:2303.15389), InternViT-6B (arXiv:2312.14238), ViT-22B
(arXiv:2302.05442). Which "Big" and which "5B" the paper means is our guess.

**Rows.** Section 7 of the paper: seconds of an iteration on RTX 4090 cards, parallelism as TP/PP/DP.

**Which rows are fitted was written down before anything was simulated**: `FITTED`, eight of the 20. All
columns of the 12 others are held out. The eight have every kind of row (language only and multimodal, TP 1
and 2, 8 to 64 stages), but none of LLaMA3-70B and none with replicas: these it has to find by itself.

**What the paper does not say**, and what is taken in its place, written down before anything was simulated:

    samples     one a microbatch: Table 7 has 192 microbatches at batch 192
    lengths     GPT: 2,048 tokens, its published context, packed, all equal. Multimodal: the 256 patches of a
                224-pixel image (the encoders' published resolution) and as many tokens of text, each times a
                log-normal factor of its own with mean 1; the language model sees both
    split       layers in a row, encoder first, head last, cut between layers so that the sum of squares of
                the stages' operations at mean lengths is least
    noise       every task times a log-normal factor with sd 0.22: the spread that the paper measured for
                compute, (p95-p5)/p50 up to 0.73, is 3.29 sd
    TP          two all-reduces a layer and direction of the layer's activation in FP16, each 2 (tp-1)/tp
                times its bytes over the link, on the critical path
    messages    a stage's activation in FP16 over the link; gradients the same
    DP          at the end the gradients of the largest stage in FP16, 2 (dp-1)/dp times over the link
    memory      34 bytes a token and unit of width for each layer (arXiv:2205.05198, without the attention
                matrix), for comparisons at equal bytes only

The optimizer, embeddings, losses, launches and data loading are left out.

**Operations** of a layer are counted by the project's cost analysis; nothing is computed, only traced.
Products with weights grow with the number of tokens, attention's own two with its square; two counts, at two
lengths, tell them apart. Masked products count in full. A backward repeats each product of weights twice,
once for the input (I) and once for the weights (W), and each of attention's twice, both in I.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rrfp_jax.forecast.cost_analysis import program_cost
from rrfp_jax.studies.families import noisy
from rrfp_jax.trace.costs import Workload


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A row of equal transformer layers; `gated` if the feed-forward part has a third matrix (SwiGLU);
    `vocabulary` is that of the head that follows, 0 for none."""

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
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        return attention + (3 if self.gated else 2) * self.width * self.hidden


def _vision(layers: int, width: int, hidden: int, heads: int) -> Tower:
    sizes: dict[str, Any] = {"layers": layers, "width": width, "hidden": hidden, "heads": heads}
    return Tower(**sizes, kv_heads=heads, head_width=width // heads)


def _llama(layers: int, width: int, hidden: int, heads: int, vocabulary: int) -> Tower:
    sizes: dict[str, Any] = {"layers": layers, "width": width, "hidden": hidden, "heads": heads}
    return Tower(**sizes, kv_heads=8, head_width=128, gated=True, vocabulary=vocabulary)


class Model(NamedTuple):
    """A language model, perhaps behind an encoder of images."""

    language: Tower
    vision: Tower | None


VISION: Mapping[str, Tower] = {
    "ViT-L": _vision(24, 1024, 4096, 16),
    "ViT-H": _vision(32, 1280, 5120, 16),
    "ViT-g": _vision(40, 1408, 6144, 16),
    "ViT-Big": _vision(48, 1664, 8192, 16),
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
    """A row of the paper's main table: samples and seconds of an iteration, by `SCHEDULES`."""

    model: str
    tp: int
    pp: int
    dp: int
    batch: int
    seconds: tuple[float, float, float, float]

    @property
    def name(self) -> str:
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


LENGTHS = (256, 512)
"""Tokens at which a layer is counted."""


def _layer(tower: Tower) -> Callable[..., jax.Array]:
    def forward(x: jax.Array, *weights: jax.Array) -> jax.Array:
        query, key, value, out, up, down, *gate = weights
        group = tower.heads // tower.kv_heads
        q = (x @ query).reshape(-1, tower.kv_heads, group, tower.head_width)
        k, v = ((x @ w).reshape(-1, tower.kv_heads, tower.head_width) for w in (key, value))
        scores = jnp.einsum("tkgh,skh->kgts", q, k) / math.sqrt(tower.head_width)
        mixed = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(len(x), -1) @ out
        hidden = jax.nn.silu(x @ gate[0]) * (x @ up) if gate else jax.nn.gelu(x @ up)
        return x + hidden @ down

    return forward


def _weights(tower: Tower) -> list[tuple[int, int]]:
    """Shapes, in the order in which the layer takes them."""
    width, hidden = tower.width, tower.hidden
    queries, keys = tower.heads * tower.head_width, tower.kv_heads * tower.head_width
    gate = [(width, hidden)] if tower.gated else []
    return [
        *((width, queries), (width, keys), (width, keys), (queries, width)),
        *((width, hidden), (hidden, width), *gate),
    ]


@cache
def per_token(tower: Tower) -> tuple[float, float]:
    """(a, b): the forward of one layer on n tokens has a n + b n^2 operations."""
    counts = []
    for tokens in LENGTHS:
        shapes = [(tokens, tower.width), *_weights(tower)]
        specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        closed = jax.make_jaxpr(_layer(tower))(*specs)
        counts.append(sum(program_cost(closed).flops.values()))
    short, long = LENGTHS
    square = (counts[1] / long - counts[0] / short) / (long - short)
    return counts[0] / short - square * short, square


BYTES, HELD = 2, 34
"""Of a value in FP16; and held of each token and unit of width by a layer."""


class Sample(NamedTuple):
    """Tokens of a microbatch: of its images, and all that the language model sees."""

    image: float
    all: float


class Layer(NamedTuple):
    """A share of a transformer layer, or of the head, which has no attention: a forward on n tokens has
    `linear * n + square * n^2` operations; `width` is of what it passes on; `vision` sees the images
    alone."""

    linear: float
    square: float
    width: int
    parameters: int
    vision: bool
    share: float = 1.0

    @property
    def attends(self) -> float:
        """Its share, if it is a transformer layer; the head is none."""
        return self.share if self.square else 0.0

    def tokens(self, sample: Sample) -> float:
        return sample.image if self.vision else sample.all

    def flops(self, sample: Sample) -> tuple[float, float, float]:
        n = self.tokens(sample)
        linear, square = self.share * self.linear * n, self.share * self.square * n * n
        return linear + square, linear + 2 * square, linear

    def passed(self, sample: Sample) -> float:
        """Bytes of what it passes on, all of it."""
        return BYTES * self.width * self.tokens(sample)

    def held(self, sample: Sample) -> float:
        """Bytes that it keeps for its backward."""
        return self.share * HELD * self.width * self.tokens(sample)


def layers_of(name: str) -> list[Layer]:
    """Of a model by the paper's name, in order."""
    language, vision = model(name)
    found = [] if vision is None else _layers(vision, vision=True)
    found += _layers(language, vision=False)
    head = language.width * language.vocabulary
    return [*found, Layer(2.0 * head, 0.0, language.width, head, vision=False)]


def _layers(tower: Tower, vision: bool) -> list[Layer]:
    linear, square = per_token(tower)
    return [Layer(linear, square, tower.width, tower.layer_parameters, vision)] * tower.layers


def in_whole_layers(layers: Sequence[Layer], work: Sequence[float], stages: int) -> list[list[Layer]]:
    """Cut between layers, so that the sum of squares of what stages have to do is least."""
    before = [0.0, *accumulate(work)]
    best: list[tuple[float, list[int]]] = [(0.0, [0]), *[(math.inf, [])] * len(work)]  # by layers so far
    for _ in range(stages):
        best = [(math.inf, [])] + [
            min(
                (
                    (best[first][0] + (before[end] - before[first]) ** 2, [*best[first][1], end])
                    for first in range(end)
                ),
                key=itemgetter(0),
            )
            for end in range(1, len(work) + 1)
        ]
    return [list(layers[first:end]) for first, end in pairwise(best[-1][1])]


def in_equal_work(layers: Sequence[Layer], work: Sequence[float], stages: int) -> list[list[Layer]]:
    """Cut anywhere, also within a layer, so that all stages have as much to do."""
    ends = [0.0, *accumulate(work)]
    cuts = [ends[-1] * stage / stages for stage in range(stages + 1)]
    found = []
    for begin, end in pairwise(cuts):
        parts = [
            layer._replace(share=(min(high, end) - max(low, begin)) / (high - low))
            for layer, (low, high) in zip(layers, pairwise(ends), strict=True)
            if min(high, end) - max(low, begin) > 1e-9 * ends[-1]
        ]
        found.append(parts)
    return found


CONTEXT, PATCHES, TEXT = 2048, 256, 256
NOISE = 0.22


@dataclass(frozen=True)
class Machine:
    """The fitted numbers.

    Attributes:
        flops: operations per second of one card.
        link: bytes per second between cards, wherever they are.
        spread: standard deviation of the logarithm of a sample's image and text lengths.
        exchange: seconds for which a synchronous message of some length holds both cards, beside its bytes:
            they agree on its shape, the host waits for the card, launches come late.
        layer: seconds that each of F, I and W takes a transformer layer beside its operations: launches,
            memory traffic. Tensor parallelism does not divide it.
        even: whether stages have equal times at mean lengths, as if layers could be cut, not the split above.
    """

    flops: float
    link: float
    spread: float
    exchange: float = 0.0
    layer: float = 0.0
    even: bool = False


def _mean(name: str) -> Sample:
    return Sample(0, CONTEXT) if model(name).vision is None else Sample(PATCHES, PATCHES + TEXT)


def samples_of(row: Row, spread: float, seed: int) -> list[Sample]:
    """The microbatches of one replica's step."""
    draw, count = random.Random(seed), row.batch // row.dp
    if model(row.model).vision is None:
        return [_mean(row.model)] * count

    def length(mean: float) -> float:
        return mean * math.exp(draw.gauss(-(spread**2) / 2, spread))

    lengths = [(length(PATCHES), length(TEXT)) for _ in range(count)]
    return [Sample(image, image + text) for image, text in lengths]


@cache
def stages_of(name: str, tp: int, stages: int, machine: Machine) -> list[list[Layer]]:
    layers, mean = layers_of(name), _mean(name)
    if machine.even:
        return in_equal_work(layers, [sum(_seconds([one], tp, machine, mean)) for one in layers], stages)
    return in_whole_layers(layers, [sum(one.flops(mean)) for one in layers], stages)


def workload(row: Row, machine: Machine, seed: int) -> Workload:
    samples = samples_of(row, machine.spread, seed)
    stages = stages_of(row.model, row.tp, row.pp, machine)
    times = [[_seconds(layers, row.tp, machine, sample) for sample in samples] for layers in stages]
    links = [tuple(layers[-1].passed(sample) / machine.link for sample in samples) for layers in stages]
    links[-1] = (0.0,) * len(samples)
    forward, inputs, weights = (
        tuple(tuple(parts[part] for parts in of_stage) for of_stage in times) for part in range(3)
    )
    exact = Workload(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        transfer_forward=tuple(links),
        transfer_backward=(links[-1], *links[:-1]),
        activation_bytes=tuple(
            tuple(sum(layer.held(sample) for layer in layers) / row.tp for sample in samples)
            for layers in stages
        ),
    )
    return noisy(exact, random.Random(f"noise {seed}"), NOISE)


def _seconds(layers: Sequence[Layer], tp: int, machine: Machine, sample: Sample) -> list[float]:
    """Of a stage's F, I and W; what tensor parallelism reduces belongs to F and I."""
    flops = [sum(part) for part in zip(*(layer.flops(sample) for layer in layers), strict=True)]
    reduced = 2 * sum(layer.attends * layer.passed(sample) for layer in layers)
    wait = 2 * (tp - 1) / tp * reduced / machine.link
    fixed = machine.layer * sum(layer.attends for layer in layers)
    forward, inputs, weights = (fixed + own / tp / machine.flops for own in flops)
    return [forward + wait, inputs + wait, weights]


def reduce_seconds(row: Row, machine: Machine) -> float:
    """What adding up the replicas' gradients takes at the end of a step."""
    stages = stages_of(row.model, row.tp, row.pp, machine)
    largest = max(sum(layer.share * layer.parameters for layer in own) for own in stages)
    return 2 * (row.dp - 1) / row.dp * BYTES * largest / row.tp / machine.link
