"""Published decoders on random tokens, for planning and for measuring speed: what their configs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from configs.quickstart import adamw, loss
from configs.sharded import SEQUENCES, tensors
from models import decoder


@dataclass(frozen=True)
class RandomTokens:
    """Microbatches of equally likely tokens, other ones for each (seed, step, microbatch)."""

    vocab_size: int
    shape: tuple[int, int]  # sequences, tokens of each
    microbatches: int
    seed: int

    def plan(self, step: int) -> list[rrfp.Microbatch]:
        """Shapes only."""
        dtypes = {"tokens": np.int32, "labels": np.int32, "mask": np.float32}
        fields = {name: jax.ShapeDtypeStruct(self.shape, dtype) for name, dtype in dtypes.items()}
        weight = float(self.shape[0] * self.shape[1])
        return [rrfp.Microbatch(fields, (self.seed, step, j), weight) for j in range(self.microbatches)]

    def load(self, microbatch: rrfp.Microbatch, fields: Collection[str]) -> Mapping[str, Any]:
        """Labels are the tokens, one further."""
        batch, length = self.shape
        drawn = np.random.default_rng(microbatch.source).integers(self.vocab_size, size=(batch, length + 1))
        arrays = {
            "tokens": drawn[:, :-1].astype(np.int32),
            "labels": drawn[:, 1:].astype(np.int32),
            "mask": np.ones(self.shape, np.float32),
        }
        return {name: arrays[name] for name in fields}


@dataclass(frozen=True, kw_only=True)
class Decoder(rrfp.RunConfig):
    """A published decoder and a batch."""

    model: decoder.DecoderConfig
    tied: bool = False  # one matrix for embedding and head
    spread_sequences: bool = False  # what stages send lies spread over their devices (mesh.tp), as tensors do
    sequence_length: int = 2048  # tokens
    batch: int = 1  # sequences of a microbatch
    microbatches: int = 32  # of a step
    learning_rate: float = 2.5e-4  # of every step
    weights: str = ""  # folder of a published model to begin with; empty for random ones

    def pipeline(self) -> rrfp.Pipeline:
        """Embedding, blocks, head; with `mesh.tp` each stage's devices share its tensors."""
        return self.pipeline_of(decoder.Block, tensors(self.model))

    def pipeline_of(self, block: type, sharding: Mapping[str, P]) -> rrfp.Pipeline:
        """The same, of blocks of some kind, whose parameters are shared so."""
        layers = [
            rrfp.layer(decoder.Embed, self.model),
            rrfp.layer(block, self.model, repeat=self.model.n_layers),
            rrfp.layer(decoder.Head, self.model),
        ]
        tied = {"0.tokens.embedding": "-1.tokens.embedding"} if self.tied else None
        carry = SEQUENCES if self.spread_sequences else P()
        return rrfp.Pipeline(layers, loss, tied=tied, sharding=sharding, carry=carry)

    def init(self) -> Any:
        """The published model's parameters, if there is one."""
        return rrfp.weights.published(self.weights, self.model) if self.weights else None

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW; matrices lose weight."""
        return adamw(self.learning_rate)

    def train_data(self) -> RandomTokens:
        """Nothing that could be learnt."""
        shape = self.batch, self.sequence_length
        return RandomTokens(self.model.vocab_size, shape, self.microbatches, self.seed)
