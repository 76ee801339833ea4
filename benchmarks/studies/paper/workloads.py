"""Steps of the paper's rows, from published sizes and three fitted numbers (`Machine`).

What the paper does not say, and what is taken in its place, written down before anything was simulated:

    samples     one a microbatch: Table 7 has 192 microbatches at batch 192
    lengths     GPT: 2,048 tokens, its published context, packed, all equal. Multimodal: the 256 patches of a
                224-pixel image (the encoders' published resolution) and as many tokens of text, each times a
                log-normal factor of its own with mean 1; the language model sees both
    split       layers in a row, encoder first, head last, cut so that the sum of the squares of the stages'
                work at mean lengths is least
    noise       every task times a log-normal factor with sd 0.22: the spread that the paper measured for
                compute, (p95-p5)/p50 up to 0.73, is 3.29 sd
    TP          two all-reduces a layer and direction of the layer's activation in FP16, each 2 (tp-1)/tp
                times its bytes over the link, on the critical path
    messages    a stage's activation in FP16 over the link; gradients the same
    DP          at the end the gradients of the largest stage in FP16, 2 (dp-1)/dp times over the link
    memory      34 bytes a token and unit of width for each layer (arXiv:2205.05198, without the attention
                matrix), for comparisons at equal bytes only

The optimizer, embeddings, losses, launches and data loading are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from benchmarks.studies.paper.layer_flops import per_token
from benchmarks.studies.paper.published import Row, Tower, model
from rrfp_jax.core.measure.workload import Workload

CONTEXT, PATCHES, TEXT = 2048, 256, 256
NOISE = 0.22
BYTES, HELD = 2, 34
"""Of a value in FP16; and held of each token and unit of width by a layer."""


@dataclass(frozen=True)
class Machine:
    """The fitted numbers.

    Attributes:
        flops: operations per second of one card.
        link: bytes per second between cards, wherever they are.
        spread: standard deviation of the logarithm of a sample's image and text lengths.
    """

    flops: float
    link: float
    spread: float


class Sample(NamedTuple):
    """Tokens of a microbatch: of its images, and all that the language model sees."""

    image: float
    all: float


class Layer(NamedTuple):
    """A transformer layer, or the head (`square` 0).

    Attributes:
        linear, square: a forward on n tokens has `linear * n + square * n^2` operations.
        width: of what it passes on.
        parameters: of its matrices.
        vision: whether its tokens are the images'.
        reduced: all-reduces in each direction under tensor parallelism.
    """

    linear: float
    square: float
    width: int
    parameters: int
    vision: bool
    reduced: int

    def tokens(self, sample: Sample) -> float:
        """That it sees of a microbatch."""
        return sample.image if self.vision else sample.all

    def flops(self, sample: Sample) -> tuple[float, float, float]:
        """Of F, I and W."""
        n = self.tokens(sample)
        linear, square = self.linear * n, self.square * n * n
        return linear + square, linear + 2 * square, linear


def layers_of(name: str) -> list[Layer]:
    """Of a model by the paper's name, in order."""
    language, vision = model(name)
    found = [] if vision is None else _tower(vision, vision=True)
    found += _tower(language, vision=False)
    head = language.width * language.vocabulary
    return [*found, Layer(2.0 * head, 0.0, language.width, head, vision=False, reduced=0)]


def _tower(tower: Tower, vision: bool) -> list[Layer]:
    linear, square = per_token(tower)
    layer = Layer(linear, square, tower.width, tower.layer_parameters, vision, reduced=2)
    return [layer] * tower.layers


@cache
def stages_of(name: str, stages: int) -> list[list[Layer]]:
    """The layers of each stage."""
    layers = layers_of(name)
    work = [sum(layer.flops(_mean(name))) for layer in layers]
    return [layers[first:end] for first, end in pairwise(_evenly(work, stages))]


def _evenly(work: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins, and the end: the sum of squares of what they have to do is least."""
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
    return best[-1][1]


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


def workload(row: Row, machine: Machine, seed: int) -> Workload:
    """One step of one replica."""
    samples = samples_of(row, machine.spread, seed)
    stages = stages_of(row.model, row.pp)
    times = [[_seconds(layers, row.tp, machine, sample) for sample in samples] for layers in stages]
    links = [[_sent(layers[-1], sample) / machine.link for sample in samples] for layers in stages]
    links[-1] = [0.0] * len(samples)
    forward, weight_input, weight = (
        tuple(tuple(one[part] for one in row) for row in times) for part in range(3)
    )
    exact = Workload(
        forward=forward,
        backward_input=weight_input,
        backward_weight=weight,
        transfer_forward=tuple(map(tuple, links)),
        transfer_backward=tuple(map(tuple, [links[-1], *links[:-1]])),
        activation_bytes=tuple(tuple(_held(layers, row.tp, s) for s in samples) for layers in stages),
    )
    draw = random.Random(f"noise {seed}")
    return exact.scaled(*(_factors(draw, exact) for _ in range(2)))


def _seconds(layers: Sequence[Layer], tp: int, machine: Machine, sample: Sample) -> list[float]:
    """Of a stage's F, I and W; what tensor parallelism reduces belongs to F and I."""
    flops = [sum(part) for part in zip(*(layer.flops(sample) for layer in layers), strict=True)]
    reduced = sum(layer.reduced * _sent(layer, sample) for layer in layers)
    wait = 2 * (tp - 1) / tp * reduced / machine.link
    forward, backward, weight = (own / tp / machine.flops for own in flops)
    return [forward + wait, backward + wait, weight]


def _sent(layer: Layer, sample: Sample) -> float:
    """Bytes of what a layer passes on."""
    return BYTES * layer.width * layer.tokens(sample)


def _held(layers: Sequence[Layer], tp: int, sample: Sample) -> float:
    return sum(HELD * layer.width * layer.tokens(sample) for layer in layers) / tp


def _factors(draw: random.Random, workload: Workload) -> list[list[float]]:
    def factor() -> float:
        return math.exp(draw.gauss(-(NOISE**2) / 2, NOISE))

    return [[factor() for _ in range(workload.microbatches)] for _ in range(workload.stages)]


def reduce_seconds(row: Row, machine: Machine) -> float:
    """What adding up the replicas' gradients takes at the end of a step."""
    largest = max(sum(layer.parameters for layer in own) for own in stages_of(row.model, row.pp))
    return 2 * (row.dp - 1) / row.dp * BYTES * largest / row.tp / machine.link
