"""How one of our arrays is made of published ones, and taken apart again; to the bit, both ways.

Shapes: I input channels of a matrix product, O output channels, S pixels of a patch's side, C colours, N rows
of a table, D channels, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Arrangement:
    """One way and back.

    Attributes:
        ours: of published arrays.
        theirs: all the published arrays, of ours.
    """

    ours: Callable[..., Array]
    theirs: Callable[[Array], Sequence[Array]]


def _halves(ours: Array) -> Sequence[Array]:
    return np.split(ours, 2, axis=-1)


AS_IS = Arrangement(lambda theirs: theirs, lambda ours: [ours])

KERNEL = Arrangement(np.transpose, lambda ours: [ours.T])
"""A matrix product: PyTorch has [O, I], flax [I, O]."""

FUSED_KERNELS = Arrangement(
    lambda first, second: np.concatenate([first, second]).T,
    lambda ours: [half.T for half in _halves(ours)],
)
"""Two matrix products of as many channels each, side by side: [O, I] twice, and [I, 2 * O]."""

FUSED_BIASES = Arrangement(lambda first, second: np.concatenate([first, second]), _halves)
"""Their biases: [O] twice, and [2 * O]."""

EXPERTS = Arrangement(
    lambda *theirs: np.stack([matrix.T for matrix in theirs]), lambda ours: [matrix.T for matrix in ours]
)
"""A matrix of every expert: [O, I] each, and [E, I, O]."""


def _pixels(theirs: Array) -> Array:
    return theirs.transpose(2, 3, 1, 0).reshape(-1, len(theirs))


def _convolution(ours: Array) -> Sequence[Array]:
    side = math.isqrt(len(ours) // COLOURS)
    return [ours.reshape(side, side, COLOURS, -1).transpose(3, 2, 0, 1)]


COLOURS = 3

PATCHES = Arrangement(_pixels, _convolution)
"""Patches projected: a convolution [D, C, S, S], and a product [S * S * C, D] of rows, columns, colours."""

ROWS = Arrangement(lambda theirs: theirs[0], lambda ours: [ours[None]])
"""A table [N, D], published as [1, N, D]."""
