"""Greedy generation against its definition: the most likely token after the sequence so far, one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gpt
from models.generate import greedy, logits_of
from tests.models import test_vlm

CONFIG = gpt.GPTConfig(d_model=16, n_heads=2, d_ff=32, n_layers=2, vocab_size=11)


@pytest.fixture(scope="module")
def layers():
    rngs = nnx.Rngs(0)
    return [gpt.Embed(CONFIG, rngs=rngs), gpt.Block(CONFIG, rngs=rngs), gpt.Head(CONFIG, rngs=rngs)]


def test_each_token_is_the_most_likely_one(layers):
    tokens = prompt = np.array([[1, 2, 3], [7, 7, 0]], np.int32)
    for _ in range(4):
        following = np.asarray(logits_of(layers, tokens)[:, -1].argmax(-1))[:, None]
        tokens = np.concatenate([tokens, following], axis=1)
    found = greedy(layers, prompt, 4)
    assert found.dtype == jnp.int32 and found.tolist() == tokens.tolist()
    assert greedy(layers, prompt, 0).tolist() == prompt.tolist()


def test_a_model_that_sees_images_gets_them_with_every_token():
    """New tokens are no places of images; each is the most likely one after those before it."""
    seen, steps, start = test_vlm.microbatch(), 3, 9
    layers, tokens = test_vlm.model(test_vlm.CFG), seen.pop("tokens")
    seen["patch_of_token"] = seen["patch_of_token"].at[:, start:].set(-1)
    completed = greedy(layers, tokens[:, :start], steps, **seen)
    assert completed.shape == tokens.shape and (completed[:, :start] == tokens[:, :start]).all()
    likely = logits_of(layers, completed, **seen).argmax(-1)
    assert (completed[:, start:] == likely[:, start - 1 : -1]).all()


def test_layers_are_told_that_nobody_trains():
    seen = []

    def layer(carry, mb):
        seen.append((mb.training, mb.get("segments"), mb.key.shape))
        return jnp.zeros((*mb["tokens"].shape, 3)).at[..., 2].set(1)

    assert greedy([layer], [[0]], 2).tolist() == [[0, 2, 2]]
    assert set(seen) == {(False, None, ())}


def test_a_prompt_is_a_batch(layers):
    with pytest.raises(AssertionError):
        greedy(layers, [1, 2, 3], 1)
