"""Decoder blocks whose MLP is one of several for each token: routed experts; plain flax NNX.

As in Mixtral (arXiv:2401.04088): a router gives each token probabilities of the experts, the `top_k` most
likely ones compute it, and their results are added, weighted by those probabilities, which are made to add up
to 1. Every expert has as many slots for the tokens of a row; who finds all of them taken goes without.

A block gives the stream and a `Balance`, whose `term` must be added to the loss:

    class Routed(moe.Block):
        def __call__(self, carry, mb):
            x, balance = super().__call__(carry, mb)
            dropped = rrfp.Mean(balance.dropped, balance.choices)
            return x, rrfp.Loss(balance.term, metrics={"dropped": dropped})

**The term** is that of arXiv:2101.03961 (equations 4 to 6) for each row by itself, times the row's tokens; a
microbatch's is the sum over its rows. Where all experts get equally much it is `balance` times the number of
tokens. It depends on no other row, nor do slots, so nothing depends on how rows are dealt to microbatches.

Shapes: B rows, T tokens of a row, D d_model, F d_ff, E experts, k = top_k, S slots of an expert for a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder import Attention, DecoderConfig, norm, turn_of


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(DecoderConfig):
    """A decoder with routed experts, SwiGLU each; a ValueError says what does not fit.

    Attributes:
        top_k: experts that compute a token.
        capacity: slots that experts have for a row, relative to the row's choices, top_k a token; from
            n_experts / top_k on, or None, no token goes without, whatever the router does.
        balance: of the loss; how much routers are made to give all experts equally many tokens.
    """

    n_experts: int  # of a block
    top_k: int = 2
    capacity: float | None = None
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k={self.top_k}: give 1 to n_experts={self.n_experts}")
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"capacity={self.capacity}: experts would have no slots; give 1 or more")
        for name, only in (("gated", True), ("biases", False), ("parallel", False)):
            if (value := getattr(self, name)) != only:
                raise ValueError(f"{name}={value!r}: blocks with experts have only {name}={only!r}")

    def slots(self, tokens: int) -> int:
        """Of an expert, for a row of so many tokens."""
        if self.capacity is None:
            return tokens
        return min(tokens, math.ceil(self.capacity * self.top_k * tokens / self.n_experts))


class Balance(NamedTuple):
    """How evenly a microbatch's tokens were given to the experts of one block; sums.

    Attributes:
        term: of the loss, scalar; see the module's text.
        dropped: choices for which the expert had no slot left.
        choices: top_k for each token that is no padding.
    """

    term: jax.Array
    dropped: jax.Array
    choices: jax.Array


class Experts(nnx.Module):  # type: ignore[misc]
    """Router and experts; dtype[B, T, D] -> same, and the `Balance`."""

    def __init__(self, cfg: RoutedConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        D, F, E = cfg.d_model, cfg.d_ff, cfg.n_experts
        normal = nnx.initializers.normal(cfg.init_scale)

        def matrices(*shape: int) -> nnx.Param:
            return nnx.Param(normal(rngs.params(), shape, cfg.param_dtype))

        self.router = matrices(D, E)
        self.up, self.gate, self.down = matrices(E, D, F), matrices(E, D, F), matrices(E, F, D)

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, Balance]:
        """`real`, bool[B, T]: which tokens are no padding; the others get 0 and take no slots."""
        cfg, (B, T, D) = self.cfg, x.shape
        chex.assert_shape(real, (B, T))
        logits = x.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        probabilities = jax.nn.softmax(logits)  # [B, T, E]
        chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), cfg.top_k)[1]  # [B, T, k]
        picked = jax.nn.one_hot(chosen, cfg.n_experts) * real[..., None, None]  # [B, T, k, E]
        slots = jax.vmap(partial(_slots, each=cfg.slots(T)))(picked.reshape(B, T * cfg.top_k, -1))
        shares = jnp.einsum("bte,btke->btk", probabilities, picked)
        shares = shares / jnp.maximum(shares.sum(-1, keepdims=True), 1e-9)  # of padding all are 0
        results = self._computed(jnp.repeat(x, cfg.top_k, axis=1), slots).reshape(B, T, cfg.top_k, D)
        y = jnp.einsum("btkd,btk->btd", results, shares.astype(x.dtype))
        return y, self._balance(probabilities, picked, real, slots)

    def _computed(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Each choice's token as its expert computes it; dtype[B, T * k, D], int[B, T * k] -> dtype same."""
        cfg, (B, _, D) = self.cfg, x.shape
        E, S = cfg.n_experts, cfg.slots(x.shape[1] // cfg.top_k)
        up, gate, down = (matrix[...].astype(x.dtype) for matrix in (self.up, self.gate, self.down))
        given = jax.vmap(partial(_put, size=E * S))(x, slots).reshape(B, E, S, D)
        hidden = jax.nn.silu(jnp.einsum("besd,edf->besf", given, gate))
        hidden = hidden * jnp.einsum("besd,edf->besf", given, up)
        made = jnp.einsum("besf,efd->besd", hidden, down).reshape(B, E * S, D)
        return jax.vmap(_got)(made, slots)

    def _balance(
        self, probabilities: jax.Array, picked: jax.Array, real: jax.Array, slots: jax.Array
    ) -> Balance:
        cfg = self.cfg
        tokens, taken = real.sum(-1), picked.sum((1, 2))  # [B], [B, E]
        likely = (probabilities * real[..., None]).sum(1)  # [B, E]
        rows = (taken * likely).sum(-1) * cfg.n_experts / cfg.top_k / jnp.maximum(tokens, 1)
        choices = cfg.top_k * tokens.sum()
        served = (slots < cfg.n_experts * cfg.slots(real.shape[1])).sum()
        return Balance(cfg.balance * rows.sum(), choices - served, choices)


def _slots(picked: jax.Array, each: int) -> jax.Array:
    """Which slot each choice gets, numbered through all experts; float[T * k, E] of 0 and 1 -> int[T * k].

    Earlier ones come first. Who gets none is given a number behind all slots, each another one.
    """
    choices, experts = picked.shape
    before = jnp.cumsum(picked.astype(jnp.int32), axis=0) - 1
    place = (before * picked.astype(jnp.int32)).sum(-1)
    found = (picked.sum(-1) > 0) & (place < each)
    return jnp.where(found, picked.argmax(-1) * each + place, experts * each + jnp.arange(choices))


# No slot is written or read twice, and XLA is told so: gradients are then put to their places, not added up
# by atomics in an order of their own.


def _put(x: jax.Array, slots: jax.Array, size: int) -> jax.Array:
    """Rows to their slots, 0 to the others; float[T * k, D], int[T * k] -> float[size, D]."""
    empty = jnp.zeros((size, x.shape[1]), x.dtype)
    return empty.at[slots].set(x, mode="drop", unique_indices=True)


def _got(made: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows from their slots, 0 for those without; float[size, D], int[T * k] -> float[T * k, D]."""
    return made.at[slots].get(mode="fill", fill_value=0, unique_indices=True)


class Block(nnx.Module):  # type: ignore[misc]
    """Attention, then routed experts; dtype[B, T, D] -> same, and the `Balance`."""

    def __init__(self, cfg: RoutedConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.attention_norm = norm(cfg, cfg.d_model, rngs)
        self.attention = Attention(cfg, rngs=rngs)
        self.mlp_norm = norm(cfg, cfg.d_model, rngs)
        self.experts = Experts(cfg, rngs=rngs)

    def __call__(self, carry: jax.Array, mb: Mapping[str, jax.Array]) -> tuple[jax.Array, Balance]:
        """Add both branches to the stream."""
        normed = self.attention_norm(carry)
        x = carry + self.attention(normed, mb.get("segments"), turn_of(self.cfg))
        y, balance = self.experts(self.mlp_norm(x), _real(mb.get("mask"), x))
        return x + y, balance


def _real(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """Tokens up to the last label of their row, all without a mask; float[B, T] or None -> bool[B, T].

    What follows is padding, or reaches no loss. A token without a label before it, as of a question or of an
    image, is one like others.
    """
    if mask is None:
        return jnp.ones(x.shape[:2], bool)
    return jnp.flip(jnp.cumsum(jnp.flip(mask > 0, 1), 1), 1) > 0
