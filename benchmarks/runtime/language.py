"""A GPT as a pipeline, and random tokens for it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import rrfp_jax as rrfp
from models import gpt


def pipeline(model: gpt.GPTConfig) -> rrfp.Pipeline:
    """Embedding, blocks, head, and the summed cross entropy."""
    layers = [
        rrfp.layer(gpt.Embed, model),
        rrfp.layer(gpt.Block, model, repeat=model.n_layers),
        rrfp.layer(gpt.Head, model),
    ]
    return rrfp.Pipeline(layers, loss)


def loss(logits: jax.Array, mb: Any) -> rrfp.Loss:
    """Summed cross entropy (nats); weighed by tokens."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


def microbatches(model: gpt.GPTConfig, count: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Random tokens and labels, int32[batch, length] each, `count` times; the same in every run."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, model.vocab_size, (batch, length + 1), np.int32) for _ in range(count)]
    return [{"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
