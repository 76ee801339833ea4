"""A byte-level GPT on sections of the standard library's sources, of natural length: microbatches differ.

Every microbatch has the same number of sections, all of one bucket, so costs differ as lengths do. With
`balance=True` it has as many as cost the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import optax

import rrfp_jax as rrfp
from configs.quickstart import adamw, pipeline
from models import gpt


@dataclass(frozen=True, kw_only=True)
class Lengths(rrfp.RunConfig):
    """0.9 M parameters, one block per stage, 16 microbatches of different lengths a step."""

    model: gpt.GPTConfig
    path: str = ""  # text to train on: file, folder or glob; empty for the standard library's *.py files
    document: Any = "section"  # what blank lines separate, or "file"
    buckets: int = 6  # at most so many lengths, fitted to the documents
    longest: int = 256  # bytes; longer documents are split
    batch: int = 4  # documents of a microbatch; with balance, of one of the longest
    microbatches: int = 16  # of a step
    packed: bool = False  # several documents in a row; all rows are of one length then
    balance: bool = False  # as many documents in a microbatch as cost the same
    order: Any = "drawn"  # of a step's microbatches: or longest, shortest, zigzag
    learning_rate: float = 3e-3  # the highest, after the warm-up

    def pipeline(self) -> rrfp.Pipeline:
        """The quickstart's; its loss counts real bytes."""
        return pipeline(self.model)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with a warm-up of 10 steps; matrices lose weight."""
        rate = optax.linear_schedule(0.0, self.learning_rate, 10)
        return adamw(rate)

    def train_data(self) -> rrfp.data.Documents:
        """Shuffled documents."""
        return self._documents("train")

    def validation_data(self) -> rrfp.data.Documents:
        """Those held out."""
        return self._documents("validation")

    @functools.cached_property
    def _corpus(self) -> rrfp.data.Corpus:
        return rrfp.data.Corpus(
            source=rrfp.data.TextFiles(self.path, self.document),
            tokenizer=rrfp.data.Bytes(),
            vocabulary=self.model.vocab_size,
            bad="skip",  # empty files
        )

    def _documents(self, split: Any) -> rrfp.data.Documents:
        fitted = rrfp.data.Fit(buckets=self.buckets, longest=self.longest)
        attention = 1 / (6 * self.model.d_model)  # FLOPs, relative to the matrix products of a block
        return rrfp.data.Documents(
            corpus=self._corpus,
            lengths=(self.longest,) if self.packed else fitted,
            rows=self.batch,
            microbatches=self.microbatches,
            packed=self.packed,
            split=split,
            validation_share=0.01,
            seed=self.seed,
            balance=rrfp.data.Polynomial(square=attention) if self.balance else None,
            order=self.order,
        )


def get_config() -> Lengths:
    """The run that compares schedules."""
    return Lengths(
        name="gpt_lengths",
        steps=150,
        mesh=rrfp.Mesh(pp=4),
        model=gpt.GPTConfig(d_model=128, n_heads=4, d_ff=384, n_layers=4, embed_scale=0.5),
    )
