"""A model's layers in a row, and how they are cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from benchmarks.studies.paper.layer_flops import per_token
from benchmarks.studies.paper.published import Tower, model

BYTES, HELD = 2, 34
"""Of a value in FP16; and held of each token and unit of width by a layer."""


class Sample(NamedTuple):
    """Tokens of a microbatch: of its images, and all that the language model sees."""

    image: float
    all: float


class Layer(NamedTuple):
    """A transformer layer, or the head, which has no attention; or a share of one.

    Attributes:
        linear, square: a forward on n tokens has `linear * n + square * n^2` operations.
        width: of what it passes on.
        parameters: of its matrices.
        vision: whether its tokens are the images'.
        share: of the layer that is meant.
    """

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
        """That it sees of a microbatch."""
        return sample.image if self.vision else sample.all

    def flops(self, sample: Sample) -> tuple[float, float, float]:
        """Of F, I and W."""
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
    found = [] if vision is None else _tower(vision, vision=True)
    found += _tower(language, vision=False)
    head = language.width * language.vocabulary
    return [*found, Layer(2.0 * head, 0.0, language.width, head, vision=False)]


def _tower(tower: Tower, vision: bool) -> list[Layer]:
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
