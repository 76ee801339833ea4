"""The data contract: `plan(step)` says what a step consists of, `load` fetches only what is read.

`plan` runs on every process and must be cheap and deterministic: it gives the microbatches of a step by
shape and weight. `load` runs only where a stage reads a field (the tokens on the first stage, labels and
masks on the last). A plain function that returns the microbatches themselves is wrapped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


@dataclass(frozen=True)
class FieldSpec:
    """Shape and dtype of one field of a microbatch."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Microbatch:
    """One planned microbatch: the spec of each field, and what `load` needs to find the data.

    `source` may be anything whose `repr` is the same on every process (offsets, file names, indices);
    it is part of the plan's hash. `weight` is the microbatch's loss weight where it is known beforehand
    (tokens, say), else None.
    """

    fields: Mapping[str, FieldSpec]
    source: Any = None
    weight: float | None = None


@runtime_checkable
class Data(Protocol):
    """What a Trainer reads: a deterministic plan of each step, and the arrays of a planned microbatch."""

    def plan(self, step: int) -> Sequence[Microbatch]:
        """The microbatches of `step`, equal on every process."""
        ...

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`, each with the planned shape and dtype."""
        ...
