"""What all systems of `python -m benchmarks rivals` train: a GPT, its data, and values of its parameters."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.rivals.first_step import Model
from models import gpt

STAGES = 4
RATE = 1e-2
"""Of AdamW: high, so that a wrong update shows in the loss of the next step."""

ONE_LENGTH, THREE_LENGTHS = (128,), (256, 64, 128, 64)
"""Tokens of microbatches, repeated as long as there are some; a quarter of the second are long."""


@dataclass(frozen=True)
class Case:
    """A model on `STAGES` stages, one block each, and the microbatches of a step."""

    width: int
    rows: int
    lengths: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        return len(self.lengths)


def _case(width: int, rows: int, lengths: Sequence[int], microbatches: int) -> Case:
    return Case(width, rows, tuple(islice(cycle(lengths), microbatches)))


CASES = {
    "real-8": _case(128, 2, ONE_LENGTH, 8),
    "real-32": _case(128, 2, ONE_LENGTH, 32),
    "lengths-8": _case(128, 2, THREE_LENGTHS, 8),
    "lengths-32": _case(128, 2, THREE_LENGTHS, 32),
    "empty-8": _case(8, 1, (8,), 8),
    "empty-32": _case(8, 1, (8,), 32),
}
"""*Real*: milliseconds a task. *Lengths*: the same with three lengths. *Empty*: next to nothing to compute.
Then the number of microbatches."""


@dataclass(frozen=True)
class CaseModel(Model):
    """The model of a case, with data and values that are the same for every system."""

    case: Case

    @cached_property
    def config(self) -> gpt.GPTConfig:
        width = self.case.width
        return gpt.GPTConfig(d_model=width, n_heads=max(1, width // 32), d_ff=3 * width, n_layers=self.blocks)

    @cached_property
    def batch(self) -> list[dict[str, Any]]:
        """A microbatch each, of its own length."""
        random = np.random.default_rng(0)
        shapes = [(self.case.rows, length) for length in self.case.lengths]
        tokens = [random.integers(0, self.config.vocab_size, shape).astype(np.int32) for shape in shapes]
        return [{"tokens": own, "labels": own[:, ::-1], "mask": np.ones(own.shape, bool)} for own in tokens]

    @cached_property
    def padded(self) -> dict[str, Any]:
        """All microbatches as one array a field, each as long as the longest; what is added is masked."""
        most = max(self.case.lengths)
        wide = [
            {name: np.pad(field, ((0, 0), (0, most - field.shape[1]))) for name, field in mb.items()}
            for mb in self.batch
        ]
        return {name: np.stack([mb[name] for mb in wide]) for name in wide[0]}

    @cached_property
    def weight(self) -> float:
        """Tokens of a step."""
        return float(sum(mb["mask"].sum() for mb in self.batch))

    def values(self, kind: type, layer: int) -> Any:
        return {name: given_value(f"{layer}.{name}", spec) for name, spec in self.specs(kind).items()}

    def stage_layers(self, stage: int) -> list[tuple[type, int]]:
        """Class and number of each layer of a stage: one block, the first with the embedding, the last with
        the head."""
        layers: list[tuple[type, int]] = [(gpt.Embed, 0)] if stage == 0 else []
        layers.append((gpt.Block, stage + 1))
        return [*layers, (gpt.Head, STAGES + 1)] if stage == STAGES - 1 else layers

    def stage_values(self, stage: int) -> list[Any]:
        return [self.values(kind, number) for kind, number in self.stage_layers(stage)]

    def run_stage(self, stage: int, params: Sequence[Any], carry: Any, mb: Any) -> Any:
        """The carry behind a stage's layers."""
        for (kind, _), own in zip(self.stage_layers(stage), params, strict=True):
            carry = self.apply(kind, own, carry, mb)
        return carry


def model_of(name: str) -> CaseModel:
    """The model of a case by its name."""
    return CaseModel(STAGES, STAGES, True, CASES[name])


def given_value(path: str, spec: Any) -> Any:
    """The value of a parameter, by its path: scales are 1, matrices random; carries keep their size."""
    if len(spec.shape) == 1:
        return np.ones(spec.shape, spec.dtype)
    random = np.random.default_rng(zlib.crc32(path.encode()))
    return (spec.shape[0] ** -0.5 * random.standard_normal(spec.shape)).astype(spec.dtype)
