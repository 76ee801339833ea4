"""Transformers of published families as a list of layers; plain flax NNX.

Decoders such as GPT-3, LLaMA and Qwen. `vlm.py` puts an encoder of images before one, made of the same parts.

Every layer is `layer(carry, mb) -> carry`: `Embed` reads `mb["tokens"]`, `Block` and `Head` only the carry.
If there is `mb["segments"]`, since documents are packed, no token attends to those of another document, and
learned positions are those of `mb["positions"]`.

Shapes: B batch, T sequence, D d_model, H heads, G key and value heads, K head size, F d_ff, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.gpt import causal_attention, float32_product, rope

Turn: TypeAlias = Callable[[jax.Array], jax.Array]
"""Rotary positions put into queries or keys, float[B, T, H, K] -> same."""


@dataclass(frozen=True, kw_only=True)
class BlocksConfig:
    """Sizes and family of a transformer's blocks; a ValueError says what does not fit.

    Attributes:
        n_kv_heads: key and value heads, each shared by n_heads / n_kv_heads query heads.
        norm: "rms" or "layer" (with biases), before attention and before the MLP.
        norm_epsilon: what is added to the variance under the root.
        gated: SwiGLU instead of GELU.
        exact_gelu: GELU by the error function, not by the usual formula with tanh.
        biases: of all matrix products but the last.
        qk_norm: queries and keys are normalised per head.
        positions: "rotary", or "learned" ones that are added before the first block.
        rope_stretch: of rotary positions in sequences longer than a model was first trained on, see
            `models.gpt.stretched`: (factor, slow, fast, length); () for none.
        parallel: attention and MLP side by side, from one normalisation.
        causal: no token attends to a later one.
        attention: "explicit", `models.gpt.causal_attention`, which makes the matrix of scores; or "xla" or
            "cudnn" of `jax.nn.dot_product_attention`. "cudnn" never makes that matrix. "auto" is "cudnn"
            where the devices that a layer is traced for are GPUs and it fits (`fits_cudnn`), else "xla".
        init_scale: standard deviation that matrices and embeddings start with.
    """

    d_model: int  # channels of the residual stream
    n_layers: int  # blocks
    n_heads: int  # attention heads of a block
    n_kv_heads: int
    head_size: int  # channels of a head
    d_ff: int  # channels inside a block's MLP
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-5
    gated: bool = True
    exact_gelu: bool = False
    biases: bool = False
    qk_norm: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    rope_base: float = 10_000.0  # of rotary positions' wavelengths
    rope_stretch: tuple[float, ...] = ()
    parallel: bool = False
    causal: bool = True
    attention: Literal["auto", "explicit", "xla", "cudnn"] = "explicit"
    init_scale: float = 0.02
    dtype: DTypeLike = jnp.bfloat16  # of activations and matrix products
    param_dtype: DTypeLike = jnp.float32  # of parameters

    def __post_init__(self) -> None:
        self._at_least_1("d_model", "n_layers", "n_heads", "n_kv_heads", "head_size", "d_ff")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is no multiple of n_kv_heads={self.n_kv_heads}")
        if len(self.rope_stretch) not in (0, 4):
            raise ValueError(f"rope_stretch={self.rope_stretch}: give (factor, slow, fast, length), or ()")
        if self.attention == "explicit" and not self.causal:
            raise ValueError("causal=False: the explicit attention is causal; take attention='xla'")

    def _at_least_1(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: give a whole number, at least 1")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlocksConfig):
    """A decoder of tokens; a ValueError says what does not fit."""

    vocab_size: int  # tokens that there are
    max_length: int = 0  # tokens of the longest sequence, with learned positions

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("vocab_size")
        if self.positions == "learned" and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: learned positions need their number")


def norm(cfg: BlocksConfig, size: int, rngs: nnx.Rngs) -> nnx.Module:
    """float[..., size] -> same; statistics in float32."""
    kind = nnx.RMSNorm if cfg.norm == "rms" else nnx.LayerNorm
    return kind(size, epsilon=cfg.norm_epsilon, dtype=cfg.dtype, param_dtype=cfg.param_dtype, rngs=rngs)


def linear(cfg: BlocksConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """float[..., inputs] -> dtype[..., outputs]."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=cfg.biases,
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        kernel_init=nnx.initializers.normal(cfg.init_scale),
        rngs=rngs,
    )


def table(cfg: BlocksConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    """A matrix [rows, D]."""
    return nnx.Embed(
        rows,
        cfg.d_model,
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        embedding_init=nnx.initializers.normal(cfg.init_scale),
        rngs=rngs,
    )


def _attend(
    cfg: BlocksConfig, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Mixed values; dtype[B, T, H, K], twice dtype[B, T, G, K], int[B, T] or None -> dtype[B, T, H, K]."""
    if segments is not None:  # of another shape they would be broadcast
        chex.assert_shape(segments, q.shape[:2])
    attention = cfg.attention
    if attention == "auto":
        attention = "cudnn" if _platform() == "gpu" and segments is None and fits_cudnn(cfg) else "xla"
    if attention == "explicit":
        k, v = (jnp.repeat(y, cfg.n_heads // cfg.n_kv_heads, axis=2) for y in (k, v))
        return causal_attention(q, k, v, segments)
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=cfg.causal, implementation=attention)


def fits_cudnn(cfg: BlocksConfig) -> bool:
    """Whether cuDNN has a fused attention: half precision, heads of 8, 16, ... 128 channels (cuDNN 9's limits
    for training on GPUs from A100 on; without segments, which it would take as a matrix of scores)."""
    return jnp.dtype(cfg.dtype).itemsize == 2 and cfg.head_size % 8 == 0 and cfg.head_size <= 128


def _platform() -> str:
    """Of the devices that are traced for, which a mesh names, though none of them need be there."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else str(device.platform)


class Embed(nnx.Module):  # type: ignore[misc]
    """Tokens, and positions if they are learned; (None, int32[B, T] in `mb["tokens"]`) -> dtype[B, T, D]."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        self.tokens = table(cfg, cfg.vocab_size, rngs)
        self.positions = table(cfg, cfg.max_length, rngs) if cfg.positions == "learned" else None

    def __call__(self, carry: None, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Look the tokens up; the first layer has no carry to read."""
        chex.assert_rank(mb["tokens"], 2)
        x: jax.Array = self.tokens(mb["tokens"])
        if self.positions is not None:
            chex.assert_axis_dimension_lteq(x, 1, self.positions.num_embeddings)  # none is beyond the table
            at = mb.get("positions")
            if at is None:
                at = jnp.arange(x.shape[1])
            else:  # of another shape they would be broadcast
                chex.assert_shape(at, x.shape[:2])
            x = x + self.positions(at)
        return x


def turn_of(cfg: BlocksConfig) -> Turn | None:
    """Rotary positions of a sequence of tokens, if that is what the config has."""
    if cfg.positions != "rotary":
        return None
    return partial(rope, base=cfg.rope_base, stretch=cfg.rope_stretch)


class Attention(nnx.Module):  # type: ignore[misc]
    """Queries, keys and values, and what is made of the mixed values; dtype[B, T, D] -> same."""

    def __init__(self, cfg: BlocksConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        D, K = cfg.d_model, cfg.head_size
        self.query = linear(cfg, D, cfg.n_heads * K, rngs)
        self.key_value = linear(cfg, D, 2 * cfg.n_kv_heads * K, rngs)
        self.query_norm = norm(cfg, K, rngs) if cfg.qk_norm else None
        self.key_norm = norm(cfg, K, rngs) if cfg.qk_norm else None
        self.out = linear(cfg, cfg.n_heads * K, D, rngs)

    def __call__(self, x: jax.Array, segments: jax.Array | None, turn: Turn | None) -> jax.Array:
        """Within equal numbers of `segments`, int[B, T], if there are any; `turn` is for rotary positions."""
        cfg, (B, T, _) = self.cfg, x.shape
        q = self.query(x).reshape(B, T, cfg.n_heads, cfg.head_size)
        k, v = jnp.split(self.key_value(x).reshape(B, T, 2 * cfg.n_kv_heads, cfg.head_size), 2, axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if turn is not None:
            q, k = turn(q), turn(k)
        attended: jax.Array = self.out(_attend(cfg, q, k, v, segments).reshape(B, T, -1))
        return attended


class MLP(nnx.Module):  # type: ignore[misc]
    """SwiGLU or GELU; dtype[..., D] -> same."""

    def __init__(self, cfg: BlocksConfig, *, rngs: nnx.Rngs):
        self.exact_gelu = cfg.exact_gelu
        self.up = linear(cfg, cfg.d_model, cfg.d_ff, rngs)
        self.gate = linear(cfg, cfg.d_model, cfg.d_ff, rngs) if cfg.gated else None
        self.down = linear(cfg, cfg.d_ff, cfg.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Each token by itself."""
        up = self.up(x)
        hidden = nnx.gelu(up, not self.exact_gelu) if self.gate is None else nnx.silu(self.gate(x)) * up
        result: jax.Array = self.down(hidden)
        return result


class Block(nnx.Module):  # type: ignore[misc]
    """Attention, then an MLP: each reads the normed stream and adds to it; dtype[B, T, D] -> same."""

    def __init__(self, cfg: BlocksConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.attention_norm = norm(cfg, cfg.d_model, rngs)
        self.attention = Attention(cfg, rngs=rngs)
        self.mlp_norm = None if cfg.parallel else norm(cfg, cfg.d_model, rngs)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Add both branches to the stream."""
        return self.added(carry, mb.get("segments"), turn_of(self.cfg))

    def added(self, x: jax.Array, segments: jax.Array | None, turn: Turn | None) -> jax.Array:
        """The stream with both branches; see `Attention`."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, segments, turn)
        result: jax.Array = x + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        return result


class Head(nnx.Module):  # type: ignore[misc]
    """The last norm and the projection to the vocabulary; dtype[B, T, D] -> float32[B, T, V].

    Its matrix is [V, D] as that of `Embed`, so that the two may be tied.
    """

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        self.norm = norm(cfg, cfg.d_model, rngs)
        self.tokens = table(cfg, cfg.vocab_size, rngs)

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Logits, float32 in any dtype of computation: the loss takes the softmax of them."""
        matrix = self.tokens.embedding[...].astype(carry.dtype)
        return float32_product("btd,vd->btv", self.norm(carry), matrix)
