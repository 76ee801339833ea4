"""A small GPT as a list of layers: pre-norm, rotary positions, SwiGLU, RMSNorm; plain flax NNX.

Every layer is `layer(carry, mb) -> carry`: `Embed` reads `mb["tokens"]`, `Block` and `Head` only the carry.
If there is `mb["segments"]`, since documents are packed, no token attends to those of another document.
Modules hold `nnx.Param` variables and nothing else; all that depends on shapes alone is computed where used.

Shapes: B batch, T sequence, D d_model, H heads, K = D / H head size, F d_ff, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes, dtypes and initial scales of a GPT; a ValueError says what does not fit and what would.

    Matrices start normal with standard deviation `init_scale / sqrt(fan-in)`; the two projections of a block
    that add to the residual stream are smaller by `sqrt(2 * n_layers)`, so that the stream keeps its scale
    at any depth. Embeddings start with standard deviation `embed_scale`.
    """

    d_model: int  # channels of the residual stream
    n_heads: int  # attention heads of a block
    d_ff: int  # channels inside a block's MLP
    n_layers: int  # blocks
    vocab_size: int = 256  # tokens that there are
    dtype: DTypeLike = jnp.float32  # of activations and matrix products
    param_dtype: DTypeLike = jnp.float32  # of parameters
    init_scale: float = 1.0  # standard deviation of initial matrices, times the root of their fan-in
    embed_scale: float = 1.0  # standard deviation of initial embeddings

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "d_ff", "n_layers", "vocab_size", "init_scale", "embed_scale"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}={value}: a size or scale must be positive; give {name} > 0")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"d_model={self.d_model}, n_heads={self.n_heads}: rotary positions turn pairs of channels; "
                f"each head needs an even, whole size: make d_model a multiple of {2 * self.n_heads}"
            )
        for name in ("dtype", "param_dtype"):
            if not jnp.issubdtype(value := getattr(self, name), jnp.floating):
                raise ValueError(f"{name}={value}: the model computes in floats; give float32 or bfloat16")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float32_product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, summed and given in float32.

    Its gradient is rounded to that dtype before it is multiplied. JAX alone would multiply it as float32: of
    bfloat16 arrays at half the rate, with twice the bytes.
    """
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _float32_product(
    subscripts: str, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return float32_product(subscripts, a, b), (a, b)


def _gradients(
    subscripts: str, factors: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (a, b), (given, result) = factors, subscripts.split("->")
    left, right = given.split(",")
    rounded = gradient.astype(a.dtype)
    of_a = jnp.einsum(f"{result},{right}->{left}", rounded, b)
    return of_a, jnp.einsum(f"{result},{left}->{right}", rounded, a)


float32_product.defvjp(_float32_product, _gradients)


def rms_norm(x: jax.Array, scale: nnx.Param) -> jax.Array:
    """`scale` * `x` / the root mean square of x's last axis, computed in float32; float[..., D] -> same."""
    x32 = x.astype(jnp.float32)
    unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + NORM_EPSILON)
    return jnp.multiply(unit, scale[...]).astype(x.dtype)


def rope(
    x: jax.Array,
    base: float = ROPE_BASE,
    positions: jax.Array | None = None,
    stretch: tuple[float, ...] = (),
) -> jax.Array:
    """Turn channel pairs (i, i + K/2) of position t by t * base**(-2i/K) radians; float[B, T, H, K] -> same.

    Positions are 0, 1, ... T - 1, or int[B, T]. The inner product of a rotated query and a rotated key
    depends on positions only by their difference. `stretch` has the arguments of `stretched`.
    """
    half = x.shape[-1] // 2
    frequency = stretched(base ** -(jnp.arange(half, dtype=jnp.float32) / half), *stretch)
    at = jnp.arange(x.shape[1]) if positions is None else positions
    angle = at.astype(jnp.float32)[..., None, None] * frequency  # [T, 1, K/2] or [B, T, 1, K/2]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def stretched(
    frequency: jax.Array, factor: float = 1, slow: float = 1, fast: float = 4, length: float = 1
) -> jax.Array:
    """Frequencies for sequences longer than `length`, as LLaMA 3.1 has them; radians a token, same shape.

    What turns less than `slow` times in `length` tokens turns `factor` times slower, what turns more than
    `fast` times as before; between the two the part of each changes linearly.
    """
    turns = length * frequency / (2 * jnp.pi)
    kept = jnp.clip((turns - slow) / (fast - slow), 0, 1)
    return frequency * (kept + (1 - kept) / factor)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """Each position's softmax-weighted mean of the values up to it; float[B, T, H, K] thrice -> same.

    With `segments`, int[B, T], only of values in its own segment. Scores and softmax are float32 whatever
    the input.
    """
    chex.assert_equal_shape([q, k, v])
    if segments is not None:  # of another shape they would be broadcast
        chex.assert_shape(segments, q.shape[:2])
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, H, T, K]
    scores = float32_product("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", weights, v).swapaxes(1, 2)


def _normal(cfg: GPTConfig, rngs: nnx.Rngs, shape: tuple[int, int], scale: float = 1.0) -> nnx.Param:
    """A random matrix [fan-in, fan-out] of standard deviation `scale` * init_scale / sqrt(fan-in)."""
    std = scale * cfg.init_scale * shape[0] ** -0.5
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, cfg.param_dtype))


def _ones(cfg: GPTConfig) -> nnx.Param:
    return nnx.Param(jnp.ones(cfg.d_model, cfg.param_dtype))


def _dense(x: jax.Array, weight: nnx.Param) -> jax.Array:
    """`x @ weight`, multiplied in x's dtype; float[B, T, fan-in] -> float[B, T, fan-out]."""
    # One plain matrix product: with [B, T] kept apart, XLA's backward pass on CPU takes 1.5 times as long.
    rows, matrix = x.reshape(-1, x.shape[-1]), weight[...].astype(x.dtype)
    return jnp.matmul(rows, matrix).reshape(*x.shape[:-1], -1)


class Embed(nnx.Module):  # type: ignore[misc]
    """The token embedding; (None, int32[B, T] in `mb["tokens"]`) -> dtype[B, T, D]."""

    def __init__(self, cfg: GPTConfig, *, rngs: nnx.Rngs):
        self.dtype = cfg.dtype
        self.embedding = nnx.Param(
            cfg.embed_scale * jax.random.normal(rngs.params(), (cfg.vocab_size, cfg.d_model), cfg.param_dtype)
        )

    def __call__(self, carry: None, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Look the tokens up; the first layer has no carry to read."""
        chex.assert_rank(mb["tokens"], 2)
        embedding: jax.Array = self.embedding[...]
        return embedding[mb["tokens"]].astype(self.dtype)


class Block(nnx.Module):  # type: ignore[misc]
    """Causal attention, then SwiGLU: each reads the normed stream and adds to it; dtype[B, T, D] -> same."""

    def __init__(self, cfg: GPTConfig, *, rngs: nnx.Rngs):
        self.n_heads = cfg.n_heads
        D, F = cfg.d_model, cfg.d_ff
        residual = (2 * cfg.n_layers) ** -0.5
        self.attention_norm = _ones(cfg)
        self.qkv = _normal(cfg, rngs, (D, 3 * D))
        self.out = _normal(cfg, rngs, (D, D), residual)
        self.mlp_norm = _ones(cfg)
        self.gate_up = _normal(cfg, rngs, (D, 2 * F))
        self.down = _normal(cfg, rngs, (F, D), residual)

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Add both branches to the stream."""
        segments = mb.get("segments")
        x = carry + self._attention(rms_norm(carry, self.attention_norm), segments)
        return x + self._mlp(rms_norm(x, self.mlp_norm))

    def _attention(self, x: jax.Array, segments: jax.Array | None) -> jax.Array:
        qkv = jnp.split(_dense(x, self.qkv), 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], self.n_heads, -1) for y in qkv)
        return _dense(causal_attention(rope(q), rope(k), v, segments).reshape(x.shape), self.out)

    def _mlp(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(_dense(x, self.gate_up), 2, axis=-1)
        return _dense(jax.nn.silu(gate) * up, self.down)


class Head(nnx.Module):  # type: ignore[misc]
    """The last norm and an untied projection to the vocabulary; dtype[B, T, D] -> float32[B, T, V]."""

    def __init__(self, cfg: GPTConfig, *, rngs: nnx.Rngs):
        self.norm = _ones(cfg)
        self.logits = _normal(cfg, rngs, (cfg.d_model, cfg.vocab_size))

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> jax.Array:
        """Logits, float32 in any dtype of computation: the loss takes the softmax of them."""
        x = rms_norm(carry, self.norm)
        matrix = self.logits[...].astype(x.dtype)
        rows = float32_product("rd,dv->rv", x.reshape(-1, x.shape[-1]), matrix)
        return rows.reshape(*x.shape[:-1], -1)
