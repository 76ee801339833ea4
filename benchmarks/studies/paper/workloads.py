"""Steps of the paper's rows, from published sizes and three fitted numbers (`Machine`).

What the paper does not say, and what is taken in its place, written down before anything was simulated:

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
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.studies.paper.published import Row, model
from benchmarks.studies.paper.split import (
    BYTES,
    Layer,
    Sample,
    in_equal_work,
    in_whole_layers,
    layers_of,
)
from rrfp_jax.sim.families import noisy
from rrfp_jax.trace.costs import Workload

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
    """The layers of each stage."""
    layers, mean = layers_of(name), _mean(name)
    if machine.even:
        return in_equal_work(layers, [sum(_seconds([one], tp, machine, mean)) for one in layers], stages)
    return in_whole_layers(layers, [sum(one.flops(mean)) for one in layers], stages)


def workload(row: Row, machine: Machine, seed: int) -> Workload:
    """One step of one replica."""
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
