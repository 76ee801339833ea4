"""The quickstart: a byte-level GPT on the standard library's own sources, four stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax

import rrfp_jax as rrfp
from models import gpt


@dataclass(frozen=True, kw_only=True)
class Quickstart(rrfp.RunConfig):
    """0.9 M parameters, one block per stage, 4,096 bytes a step."""

    model: gpt.GPTConfig
    path: str = ""  # text to train on: file, folder or glob; empty for the standard library's *.py files
    sequence_length: int = 128  # bytes
    batch: int = 32  # sequences per step
    microbatches: int = 16  # that a step's sequences are cut into
    learning_rate: float = 6e-3  # the highest, after the warm-up

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.batch, self.microbatches) < 1 or self.batch % self.microbatches:
            raise rrfp.UsageError(
                f"batch={self.batch} sequences cannot be cut into microbatches={self.microbatches} of equal "
                f"size: make batch a multiple of microbatches"
            )

    def pipeline(self) -> rrfp.Pipeline:
        """The GPT; its loss counts unmasked bytes."""
        return pipeline(self.model)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW: warm up for 10 steps, decay linearly over the last 60 %; matrices lose weight."""
        decay = round(0.6 * self.steps)
        rate = optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.learning_rate, 10),
                optax.constant_schedule(self.learning_rate),
                optax.linear_schedule(self.learning_rate, 0.0, decay),
            ],
            [10, self.steps - decay],
        )
        return adamw(rate)

    def train_data(self) -> rrfp.data.ByteText:
        """Shuffled windows of the training files."""
        return self._text("train")

    def validation_data(self) -> rrfp.data.ByteText:
        """The validation files from beginning to end."""
        return self._text("validation")

    def _text(self, split: Any) -> rrfp.data.ByteText:
        return rrfp.data.ByteText(
            path=self.path,
            sequence_length=self.sequence_length,
            batch=self.batch // self.microbatches,
            microbatches=self.microbatches,
            split=split,
            seed=self.seed,
        )


def pipeline(model: gpt.GPTConfig) -> rrfp.Pipeline:
    """Embedding, blocks, head."""
    layers = [
        rrfp.layer(gpt.Embed, model),
        rrfp.layer(gpt.Block, model, repeat=model.n_layers),
        rrfp.layer(gpt.Head, model),
    ]
    return rrfp.Pipeline(layers, loss)


def loss(logits: jax.Array, mb: Any) -> rrfp.Loss:
    """Cross entropy, summed over unmasked bytes (nats)."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss((nll * mb["mask"]).sum(), weight=mb["mask"].sum())


def adamw(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """With the settings of all configs; matrices lose weight."""
    return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)


def is_matrix(params: Any) -> Any:
    """Which parameters decay."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def get_config() -> Quickstart:
    """The run `make train` runs."""
    return Quickstart(
        name="quickstart",
        steps=100,
        validation_steps=20,  # 82 kB of the 550 that are held out: an estimate, in seconds
        mesh=rrfp.Mesh(pp=4),
        model=gpt.GPTConfig(d_model=128, n_heads=4, d_ff=384, n_layers=4, embed_scale=0.5),
    )
