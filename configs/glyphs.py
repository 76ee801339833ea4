"""Characters are read from pictures: an encoder of images before a byte-level decoder, on four stages.

The data is always at hand: the characters of the font DejaVu Sans and their Unicode names, one to four in a
document, so microbatches differ by 4 times in their images. Validation has characters that no training
document has. `right` is the share of characters of their names that the model predicts from the picture and
from the name's true beginning; `right_open` counts only those that do not follow from the beginning alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rrfp_jax as rrfp
from configs.characters import Characters
from configs.open_characters import OpenCharacters
from configs.quickstart import is_matrix
from models import decoder, vlm


@dataclass(frozen=True, kw_only=True)
class Reading(rrfp.RunConfig):
    """1.5 M parameters; the encoder is on the first stage, or where `split="auto"` puts it."""

    model: vlm.VLMConfig
    blank: bool = False  # the pictures show nothing: what can be told without them
    frozen: bool = False  # the encoder keeps the values that it begins with
    base: str = ""  # checkpoints of a run to begin with, such as runs/glyphs.checkpoints
    most: int = 4  # characters of a document
    buckets: int = 4  # at most so many shapes, fitted to the documents
    batch: int = 2  # documents of a microbatch
    microbatches: int = 4  # of a step
    learning_rate: float = 3e-3  # the highest, after the warm-up

    def pipeline(self) -> rrfp.Pipeline:
        """Encoder, projection, decoder; the loss counts the characters of names."""
        encoder = [rrfp.layer(vlm.PatchEmbed, self.model.encoder)]
        encoder += [rrfp.layer(vlm.EncoderBlock, self.model.encoder, repeat=self.model.encoder.n_layers)]
        text = self.model.decoder
        layers = [
            *encoder,
            rrfp.layer(vlm.Project, self.model),
            rrfp.layer(vlm.Join, text),
            rrfp.layer(decoder.Block, text, repeat=text.n_layers),
            rrfp.layer(decoder.Head, text),
        ]
        frozen = [f"{i}.*" for i in range(1 + self.model.encoder.n_layers)] if self.frozen else []
        return rrfp.Pipeline(layers, loss, frozen=frozen)

    def init(self) -> Any:
        """The values of `base`, if there is one."""
        return rrfp.weights.checkpoint(self.base) if self.base else None

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW: warm up for 30 steps, then decay to 0; matrices lose weight."""
        rate = optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.learning_rate, 30),
                optax.linear_schedule(self.learning_rate, 0.0, max(self.steps - 30, 1)),
            ],
            [30],
        )
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)

    def train_data(self) -> OpenCharacters:
        """Shuffled documents."""
        fitted = rrfp.data.Fit(
            buckets=self.buckets, longest=(24 * self.most, 80 * self.most), multiple=(8, 8)
        )
        return self._documents("train", fitted)

    def validation_data(self) -> OpenCharacters:
        """Those held out, with their characters, in the same buckets."""
        return self._documents("validation", self.train_data().documents.bucket_lengths)

    @functools.cached_property
    def _corpus(self) -> rrfp.data.Corpus:
        encoder = self.model.encoder
        rows, columns = encoder.grid
        return rrfp.data.Corpus(
            source=Characters(self.most, self.seed, self.blank),
            tokenizer=rrfp.data.Bytes(),
            vocabulary=self.model.decoder.vocab_size,
            patches=rrfp.data.Patches(
                size=encoder.patch_size,
                merge=self.model.merge,
                longest=max(rows, columns) * encoder.patch_size,
            ),
        )

    def _documents(self, split: Any, lengths: Any) -> OpenCharacters:
        return OpenCharacters(
            rrfp.data.Documents(
                corpus=self._corpus,
                lengths=lengths,
                rows=self.batch,
                microbatches=self.microbatches,
                split=split,
                seed=self.seed,
            )
        )


def loss(logits: jax.Array, mb: Any) -> rrfp.Loss:
    """Cross entropy, summed over the characters of names (nats), and how many of them are predicted right."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    right, counted = logits.argmax(-1) == mb["labels"], mb["mask"].sum()
    return rrfp.Loss(
        (nll * mb["mask"]).sum(),
        weight=counted,
        metrics={
            "right": (right * mb["mask"]).sum(),
            "right_open": rrfp.Mean((right * mb["open"]).sum(), mb["open"].sum()),
        },
    )


def get_config() -> Reading:
    """The run that learns here, in 4 processes."""
    width: Any = {"d_model": 128, "n_heads": 4, "n_kv_heads": 4, "head_size": 32, "d_ff": 384}
    kinds: Any = {"dtype": jnp.float32, "init_scale": 0.04}
    return Reading(
        name="glyphs",
        steps=1800,
        validate_every=300,
        clip_norm=1.0,
        mesh=rrfp.Mesh(pp=4),
        split=("auto",),
        model=vlm.VLMConfig(
            encoder=vlm.EncoderConfig(
                **width,
                **kinds,
                n_layers=3,
                patch_size=8,
                grid=(4, 6),
                positions="axes",
                mean=(0.1, 0.1, 0.1),  # most of a picture is black
                std=(0.3, 0.3, 0.3),
                gated=True,
                norm="rms",
            ),
            decoder=decoder.DecoderConfig(**width, **kinds, n_layers=3, vocab_size=256),
            merge=2,
        ),
    )
