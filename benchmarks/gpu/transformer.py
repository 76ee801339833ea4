"""Transformer layers of published models in plain JAX: bfloat16 on float32 parameters.

Shapes: B sequences or images, T tokens of each, D width, H heads, G key and value heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

import rrfp_jax as rrfp
from models.gpt import rope
from rrfp_jax.runtime.model.layers import LayerSpec

EPSILON = 1e-6
Attention: TypeAlias = Literal["cudnn", "xla"]
Arrays: TypeAlias = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One layer of a model.

    Attributes:
        model: its name.
        layers: how many such layers it has.
        width, heads, kv_heads, head_size, hidden: of attention and MLP.
        causal: a decoder; else an encoder.
        tokens: of one image with its class token (encoders); of the longest sequence (decoders).
        norm: "rms" or "layer" normalisation, before both halves.
        gated: SwiGLU instead of GELU.
        biases: of all matrix products.
        qk_norm: queries and keys are normalised per head.
        rotary: positions enter by rotation.
        parallel: attention and MLP side by side, from one normalisation.
        source: of these numbers.
    """

    model: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    causal: bool
    tokens: int
    source: str
    norm: Literal["rms", "layer"] = "layer"
    gated: bool = False
    biases: bool = True
    qk_norm: bool = False
    rotary: bool = False
    parallel: bool = False


def layer(sizes: Sizes, attention: Attention) -> LayerSpec:
    """The layer for a pipeline; it takes and gives bfloat16[B, T, D].

    Args:
        attention: "cudnn" never makes the matrix of scores, "xla" does.
    """

    def apply(params: Arrays, x: jax.Array, mb: Any) -> jax.Array:
        weights = {name: value.astype(x.dtype) for name, value in params.items()}
        normed = _norm(x, weights["norm"], sizes.norm)
        attended = _attention(sizes, weights, normed, attention)
        if sizes.parallel:
            return x + attended + _mlp(sizes, weights, normed)
        x = x + attended
        return x + _mlp(sizes, weights, _norm(x, weights["norm_2"], sizes.norm))

    return rrfp.layer(apply, init=lambda key: _init(sizes, key))


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name; matrices are [in, out]."""
    width, keys = sizes.width, sizes.kv_heads * sizes.head_size
    queries = sizes.heads * sizes.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (width, queries + 2 * keys),
        "out": (queries, width),
        "up": (width, sizes.hidden * (2 if sizes.gated else 1)),
        "down": (sizes.hidden, width),
    }
    if sizes.biases:
        shapes |= {f"{name}_bias": (shape[1],) for name, shape in shapes.items()}
    shapes |= {"norm": (width,)} | ({} if sizes.parallel else {"norm_2": (width,)})
    if sizes.qk_norm:
        shapes |= {"q_norm": (sizes.head_size,), "k_norm": (sizes.head_size,)}
    return shapes


def _init(sizes: Sizes, key: jax.Array) -> Arrays:
    shapes = _shapes(sizes)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5 if len(shape) == 2 else jnp.ones(shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _norm(x: jax.Array, scale: jax.Array, kind: str) -> jax.Array:
    """Normalise the last axis in float32; without a bias, which costs next to nothing."""
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return wide.astype(x.dtype) * scale


def _product(weights: Arrays, name: str, x: jax.Array) -> jax.Array:
    out = jnp.matmul(x, weights[name])
    return out + weights[f"{name}_bias"] if f"{name}_bias" in weights else out


def _attention(sizes: Sizes, weights: Arrays, x: jax.Array, attention: Attention) -> jax.Array:
    heads, groups, size = sizes.heads, sizes.kv_heads, sizes.head_size
    qkv = _product(weights, "qkv", x).reshape(*x.shape[:2], heads + 2 * groups, size)
    q, k, v = jnp.split(qkv, [heads, heads + groups], axis=2)  # [B, T, H or G, K]
    if sizes.qk_norm:
        q, k = _norm(q, weights["q_norm"], "rms"), _norm(k, weights["k_norm"], "rms")
    if sizes.rotary:
        q, k = rope(q), rope(k)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=sizes.causal, implementation=attention)
    return _product(weights, "out", mixed.reshape(*x.shape[:2], heads * size))


def _mlp(sizes: Sizes, weights: Arrays, x: jax.Array) -> jax.Array:
    up = _product(weights, "up", x)
    if not sizes.gated:
        return _product(weights, "down", jax.nn.gelu(up))
    gate, up = jnp.split(up, 2, axis=-1)
    return _product(weights, "down", jax.nn.silu(gate) * up)
