"""An encoder of images before a decoder of text, as a list of layers; plain flax NNX.

The layers: `PatchEmbed`, n `EncoderBlock`, `Project`, `Join`, n blocks of `decoder.py`, and its `Head`. A
ViT (arXiv:2010.11929) over all patches of all images of a row, side by side; a projection to the decoder's
channels; and the decoder, which sees projected patches at the places of some of its tokens
(arXiv:2304.08485).

Shapes: B rows, T tokens of a row, P >= 1 patches of a row (of its images, one image after another),
M = P / merge**2 merged patches, C = patch_size * patch_size * 3 values of a patch, D d_model, H heads,
K head size.

Fields of a microbatch:

- `patches` uint8[B, P, C]: pixels as they are; a patch's rows, then columns, then channels. Padding: 0.
- `patch_places` int32[B, P, 2]: row and column of the patch in its image's grid. Padding: 0. With a class
  token, each image begins with a patch of 0 whose place is (-1, -1).
- `images` int32[B, P]: which image of the row a patch is of, from 1 on; 0 for padding. No patch attends to
  one of another number.
- `tokens` int32[B, T], `labels` int32[B, T], `mask` float32[B, T] and, where documents are packed,
  `segments` and `positions` int32[B, T]: as for text alone. Places of images count neither as labels
  nor in the mask; any token may stand there.
- `patch_of_token` int32[B, T]: which merged patch of its row a token takes its value from, none twice; -1
  for text.

With merge = 2, merged patch i is of the patches 4i ... 4i + 3: data puts the four of a 2 x 2 square next to
each other. Padding is computed, and reaches nothing: it attends to padding alone, and no token takes its
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder import Block, BlocksConfig, DecoderConfig, Embed, linear, norm, table
from models.gpt import rope

CHANNELS = 3  # red, green, blue


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(BlocksConfig):
    """A ViT; a ValueError says what does not fit.

    Attributes:
        patch_size: pixels of a patch's side.
        grid: rows and columns of patches of the largest image, with learned positions.
        positions: "learned", one for each place of the grid; "axes", one for each row and one for each
            column, which are added; "rotary", half of a head's channels turned by the row, half by the
            column.
        class_token: each image begins with a learned vector instead of a patch.
        mean, std: of the pixels of each channel, where 255 is 1; patches are normalised by them.
    """

    patch_size: int
    grid: tuple[int, int] = (0, 0)
    positions: Literal["learned", "axes", "rotary"] = "learned"  # type: ignore[assignment]
    class_token: bool = False
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    norm: Literal["rms", "layer"] = "layer"
    gated: bool = False
    biases: bool = True
    causal: bool = False
    attention: Literal["auto", "explicit", "xla", "cudnn"] = "xla"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("patch_size")
        if self.positions != "rotary" and min(self.grid) < 1:
            raise ValueError(
                f"grid={self.grid}: learned positions need the rows and columns of the largest image"
            )
        if self.rope_stretch:
            raise ValueError(f"rope_stretch={self.rope_stretch}: is for decoders; leave it out")
        if self.positions == "axes" and self.class_token:
            raise ValueError(
                "class_token=True: its position is in a table of all places; take positions='learned'"
            )
        if self.positions == "rotary" and self.head_size % 4:
            raise ValueError(f"head_size={self.head_size}: rows and columns turn pairs; give a multiple of 4")


@dataclass(frozen=True, kw_only=True)
class VLMConfig:
    """Encoder, decoder, and what is between them; a ValueError says what does not fit.

    Attributes:
        projector: one matrix, or an MLP of two with GELU between them.
        merge: with 2, a token of the decoder is made of 2 x 2 patches.
    """

    encoder: EncoderConfig
    decoder: DecoderConfig
    projector: Literal["linear", "mlp"] = "mlp"
    merge: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        if self.merge not in (1, 2):
            raise ValueError(f"merge={self.merge}: give 1, or 2 to make a token of 2 x 2 patches")
        if self.merge == 2 and self.encoder.class_token:
            raise ValueError(
                "merge=2: class tokens stand between the squares of patches; take class_token=False"
            )


class PatchEmbed(nnx.Module):  # type: ignore[misc]
    """Normalised pixels, projected, and positions if they are learned; (None, mb) -> dtype[B, P, D]."""

    def __init__(self, cfg: EncoderConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        rows, columns = cfg.grid
        self.pixels = linear(cfg, cfg.patch_size**2 * CHANNELS, cfg.d_model, rngs)
        self.class_token = table(cfg, 1, rngs) if cfg.class_token else None
        self.places = (
            table(cfg, cfg.class_token + rows * columns, rngs) if cfg.positions == "learned" else None
        )
        self.rows = table(cfg, rows, rngs) if cfg.positions == "axes" else None
        self.columns = table(cfg, columns, rngs) if cfg.positions == "axes" else None

    def __call__(self, carry: None, mb: Mapping[str, jax.Array]) -> jax.Array:
        """The first layer has no carry to read."""
        patches, places = mb["patches"], mb["patch_places"]
        chex.assert_shape(patches, (None, None, self.pixels.in_features))
        chex.assert_shape(places, (*patches.shape[:2], 2))
        pixels = patches.reshape(*patches.shape[:2], -1, CHANNELS).astype(jnp.float32) / 255
        pixels = (pixels - jnp.array(self.cfg.mean)) / jnp.array(self.cfg.std)
        x: jax.Array = self.pixels(pixels.reshape(patches.shape).astype(self.cfg.dtype))
        if self.class_token is not None:
            x = jnp.where(places[..., :1] < 0, self.class_token.embedding[...].astype(x.dtype), x)
        return x if self.cfg.positions == "rotary" else x + self._learned(places[..., 0], places[..., 1])

    def _learned(self, row: jax.Array, column: jax.Array) -> jax.Array:
        """What is added for places; int[B, P] twice -> dtype[B, P, D]."""
        if self.rows is not None and self.columns is not None:
            return _row_of(self.rows, row) + _row_of(self.columns, column)
        rows, columns = self.cfg.grid
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = jnp.where(inside, self.cfg.class_token + row * columns + column, -1)
        if self.cfg.class_token:
            at = jnp.where((row == -1) & (column == -1), 0, at)
        return _row_of(self.places, at)


def _row_of(embed: nnx.Embed, at: jax.Array) -> jax.Array:
    """Rows of a table [N, D]; not a number where there is none, so that the step is found out."""
    matrix = embed.embedding[...].astype(embed.dtype)
    return jnp.take(matrix, jnp.where(at < 0, len(matrix), at), axis=0, mode="fill", fill_value=jnp.nan)


class EncoderBlock(Block):
    """Attention among the patches of an image, then an MLP; dtype[B, P, D] -> same."""

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Add both branches to the stream."""
        turn = None
        if self.cfg.positions == "rotary":
            turn = partial(rope_of_places, base=self.cfg.rope_base, places=mb["patch_places"])
        return self.added(carry, mb["images"], turn)


def rope_of_places(x: jax.Array, base: float, places: jax.Array) -> jax.Array:
    """Half of each head's channels turned by the row, half by the column; float[B, P, H, K] -> same."""
    by_row, by_column = jnp.split(x, 2, axis=-1)
    turned = rope(by_row, base, places[..., 0]), rope(by_column, base, places[..., 1])
    return jnp.concatenate(turned, axis=-1)


class Project(nnx.Module):  # type: ignore[misc]
    """The encoder's last norm, and a projection; dtype[B, P, D] -> dtype[B, M, D of the decoder]."""

    def __init__(self, cfg: VLMConfig, *, rngs: nnx.Rngs):
        self.squares, self.dtype = cfg.merge**2, cfg.decoder.dtype
        encoder, outputs = cfg.encoder, cfg.decoder.d_model
        inputs = self.squares * encoder.d_model
        self.norm = norm(encoder, encoder.d_model, rngs)
        self.hidden = linear(encoder, inputs, outputs, rngs) if cfg.projector == "mlp" else None
        self.out = linear(encoder, outputs if cfg.projector == "mlp" else inputs, outputs, rngs)

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Each merged patch by itself."""
        B, P, D = carry.shape
        chex.assert_is_divisible(P, self.squares)
        x = self.norm(carry).reshape(B, P // self.squares, self.squares * D)
        if self.hidden is not None:
            x = nnx.gelu(self.hidden(x))
        projected: jax.Array = self.out(x).astype(self.dtype)
        return projected


class Join(Embed):
    """The decoder's embedding, with patches at their tokens' places; dtype[B, M, D] -> dtype[B, T, D]."""

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:  # type: ignore[override]
        """Take each patch at most once."""
        words, at = super().__call__(None, mb), mb["patch_of_token"]
        chex.assert_shape(at, words.shape[:2])
        return jnp.where(at[..., None] < 0, words, jax.vmap(_taken_once)(carry, at))


def _taken_once(patches: jax.Array, at: jax.Array) -> jax.Array:
    """Rows of `patches`, 0 where `at` is below 0; float[M, D], int[T] -> float[T, D].

    No row is taken twice, and XLA is told so: gradients are then put to their places, not added up by atomics
    in an order of their own. So the places of what is not there must differ, too.
    """
    absent = len(patches) + jnp.arange(len(at))
    rows = patches.at[jnp.where(at < 0, absent, at)]
    return rows.get(mode="fill", fill_value=0, unique_indices=True)
