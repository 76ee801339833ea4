"""Greedy generation with a trained language model, in plain JAX.

The model is a list of layers that are called as in training, `layer(carry, mb)`; the last one gives logits.
`trainer.params(modules=True)` gives such a list; of a layer with `call=` take `partial(call, layer)`. Terms
of the loss that layers give are let go. Every token takes a forward of the whole sequence. That is right for
any causal model and needs nothing of it. A cache of keys and values would be faster.

Shapes: B batch, T tokens of the prompt, N new ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from models.moe import Balance


@runtime_checkable
class LossTerm(Protocol):
    """As `rrfp_jax.Loss`, which models here do not import."""

    total: Any
    weight: Any
    metrics: Any


class Evaluated(dict[str, Any]):
    """As `rrfp_jax.EvaluationBatch`, which models here do not import: fields, `training`, and a `key`."""

    training = False

    @property
    def key(self) -> jax.Array:
        """The same at every call."""
        return jax.random.key(0)


def logits_of(
    layers: Sequence[Callable[[Any, Any], Any]], tokens: jax.Array, **fields: jax.Array
) -> jax.Array:
    """What the last layer gives; int32[B, T], and other fields that layers read -> float[B, T, V]."""
    carry: Any = None
    for layer in layers:
        given = layer(carry, Evaluated(tokens=tokens, **fields))
        carry = given[0] if _has_term(given) else given
    return carry  # type: ignore[no-any-return]


def _has_term(given: Any) -> bool:
    """Whether a layer gives (carry, term of the loss), as one with routed experts does."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (LossTerm, Balance))


def greedy(
    layers: Sequence[Callable[[Any, Any], Any]], prompt: ArrayLike, count: int, **fields: ArrayLike
) -> jax.Array:
    """The prompt, and after it `count` times the most likely next token; int[B, T] -> int32[B, T + N].

    All prompts have the same number of tokens, at least one. The model must be causal: the logits of a
    position do not depend on what is to its right, which is zeros at first. Experts with a `capacity` have
    the slots of a row of T + N tokens.

    A model that reads other fields gets them as they are given. Those by token are for all T + N of them:
    for `models/vlm.py` images and `patch_of_token`, which is -1 for new tokens.
    """
    given = jnp.asarray(prompt, jnp.int32)
    chex.assert_rank(given, 2)
    chex.assert_axis_dimension_gteq(given, 1, 1)
    start = given.shape[1]

    @jax.jit
    def completed(tokens: jax.Array, others: dict[str, jax.Array]) -> jax.Array:
        def one(at: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = logits_of(layers, tokens, **others)
            return tokens.at[:, at].set(logits[:, at - 1].argmax(-1).astype(jnp.int32))

        found: jax.Array = jax.lax.fori_loop(start, start + count, one, tokens)
        return found

    arrays = {name: jnp.asarray(value) for name, value in fields.items()}
    done: jax.Array = completed(jnp.pad(given, ((0, 0), (0, count))), arrays)
    return done
