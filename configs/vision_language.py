"""Published decoders behind published encoders, on random images and tokens: what their configs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import NDArray

import rrfp_jax as rrfp
from configs.quickstart import adamw, loss
from configs.sharded import tensors
from models import decoder, vlm


@dataclass(frozen=True, kw_only=True)
class RandomImages:
    """Microbatches of random images and tokens; they differ in how many images a row begins with.

    Every image is as large as the encoder's grid; after the last one there is equally much text.
    """

    model: vlm.VLMConfig
    rows: int
    text: int  # tokens of a row besides places of images
    images: tuple[int, ...]  # of a row; each as likely
    microbatches: int
    seed: int

    @property
    def buckets(self) -> Sequence[Mapping[str, jax.ShapeDtypeStruct]]:
        """One for each number of images."""
        return [self._fields(images) for images in self.images]

    def plan(self, step: int) -> list[rrfp.Microbatch]:
        """Shapes only; the weight is the number of labels."""
        drawn = np.random.default_rng((self.seed, step)).choice(self.images, self.microbatches)
        weight = float(self.rows * self.text)
        return [
            rrfp.Microbatch(self._fields(images), (self.seed, step, j, images), weight)
            for j, images in enumerate(drawn.tolist())
        ]

    def load(self, microbatch: rrfp.Microbatch, fields: Collection[str]) -> Mapping[str, Any]:
        """Labels are the tokens, one further."""
        *seed, images = microbatch.source
        draw = np.random.default_rng(seed)
        shapes = self._fields(images)
        rows, length = shapes["tokens"].shape
        drawn = draw.integers(self.model.decoder.vocab_size, size=(rows, length + 1)).astype(np.int32)
        at, begin = np.arange(length, dtype=np.int32), length - self.text
        whole: dict[str, NDArray[Any]] = {
            "patches": draw.integers(256, size=shapes["patches"].shape, dtype=np.uint8),
            "patch_places": np.tile(self._places, (images, 1)),
            "images": np.repeat(np.arange(1, images + 1, dtype=np.int32), len(self._places)),
            "tokens": drawn[:, :-1],
            "labels": drawn[:, 1:],
            "mask": (at >= begin).astype(np.float32),
            "patch_of_token": np.where(at < begin, at, np.int32(-1)),
        }
        return {name: np.broadcast_to(whole[name], shapes[name].shape) for name in fields}

    @property
    def _places(self) -> NDArray[np.int32]:
        """Rows and columns of an image's patches, those of a square that is merged one after another."""
        merge, (rows, columns) = self.model.merge, self.model.encoder.grid
        grid = np.indices((rows, columns), np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
        return grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)

    def _fields(self, images: int) -> dict[str, jax.ShapeDtypeStruct]:
        patches = self.rows, images * len(self._places)
        row = self.rows, self.text + patches[1] // self.model.merge**2
        values = vlm.CHANNELS * self.model.encoder.patch_size**2
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "patches": ((*patches, values), np.uint8),
            "patch_places": ((*patches, 2), np.int32),
            "images": (patches, np.int32),
            "mask": (row, np.float32),
        }
        shapes |= dict.fromkeys(("tokens", "labels", "patch_of_token"), (row, np.int32))
        return {name: jax.ShapeDtypeStruct(*given) for name, given in shapes.items()}


def layers(model: vlm.VLMConfig, block: type = decoder.Block) -> list[Any]:
    """Encoder, projector, decoder of blocks of this kind."""
    encoder, text = model.encoder, model.decoder
    return [
        rrfp.layer(vlm.PatchEmbed, encoder),
        rrfp.layer(vlm.EncoderBlock, encoder, repeat=encoder.n_layers),
        rrfp.layer(vlm.Project, model),
        rrfp.layer(vlm.Join, text),
        rrfp.layer(block, text, repeat=text.n_layers),
        rrfp.layer(decoder.Head, text),
    ]


def of_encoder(model: vlm.VLMConfig) -> list[str]:
    """Patterns of the encoder's parameters; those of the projector behind its last norm are none of them."""
    project = 1 + model.encoder.n_layers
    return [*(f"{i}.*" for i in range(project)), f"{project}.norm.*"]


@dataclass(frozen=True, kw_only=True)
class VisionLanguage(rrfp.RunConfig):
    """A published encoder, a published decoder, and a batch."""

    model: vlm.VLMConfig
    tied: bool = False  # one matrix for the decoder's embedding and head
    freeze_encoder: bool = False  # its parameters keep their values, and it has no backward
    text: int = 1024  # tokens of a row, besides those that are images
    images: tuple[int, ...] = (1, 2, 4)  # of a row; each microbatch has one of these numbers
    batch: int = 1  # rows of a microbatch
    microbatches: int = 64  # of a step
    learning_rate: float = 1e-4  # of every step

    def pipeline(self) -> rrfp.Pipeline:
        """Encoder, projector, decoder; with `mesh.tp` each stage's devices share its tensors."""
        encoder, text = self.model.encoder, self.model.decoder
        return rrfp.Pipeline(
            layers(self.model),
            loss,
            frozen=of_encoder(self.model) if self.freeze_encoder else (),
            tied={f"{2 + encoder.n_layers}.tokens.embedding": "-1.tokens.embedding"} if self.tied else None,
            sharding=tensors(encoder) | tensors(text),
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW; matrices lose weight."""
        return adamw(self.learning_rate)

    def train_data(self) -> RandomImages:
        """Nothing that could be learnt."""
        return RandomImages(
            model=self.model,
            rows=self.batch,
            text=self.text,
            images=self.images,
            microbatches=self.microbatches,
            seed=self.seed,
        )
