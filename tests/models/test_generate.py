"""Greedy generation against its definition: the most likely token after the sequence so far, one by one."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.mixtral_8x7b import RoutedBlock
from models import decoder, gpt, moe
from models.generate import greedy, logits_of
from tests.models import test_moe, test_vlm

CONFIG = gpt.GPTConfig(d_model=16, n_heads=2, d_ff=32, n_layers=2, vocab_size=11)


@pytest.fixture(scope="module")
def layers():
    rngs = nnx.Rngs(0)
    return [gpt.Embed(CONFIG, rngs=rngs), gpt.Block(CONFIG, rngs=rngs), gpt.Head(CONFIG, rngs=rngs)]


@pytest.mark.costly(reason="a program for each length")
def test_each_token_is_the_most_likely_one(layers):
    tokens = prompt = np.array([[1, 2, 3], [7, 7, 0]], np.int32)
    for _ in range(2):
        following = np.asarray(logits_of(layers, tokens)[:, -1].argmax(-1))[:, None]
        tokens = np.concatenate([tokens, following], axis=1)
    found = greedy(layers, prompt, 2)
    assert found.dtype == jnp.int32 and found.tolist() == tokens.tolist()
    assert greedy(layers, prompt, 0).tolist() == prompt.tolist()


@pytest.mark.slow(reason="7 s; text in test_each_token_is_the_most_likely_one")
def test_a_model_that_sees_images_gets_them_with_every_token():
    """New tokens are no places of images; each is the most likely one after those before it."""
    seen, steps, start = test_vlm.microbatch(), 3, 9
    layers, tokens = test_vlm.model(test_vlm.CFG), seen.pop("tokens")
    seen["patch_of_token"] = seen["patch_of_token"].at[:, start:].set(-1)
    completed = greedy(layers, tokens[:, :start], steps, **seen)
    assert completed.shape == tokens.shape and (completed[:, :start] == tokens[:, :start]).all()
    likely = logits_of(layers, completed, **seen).argmax(-1)
    assert (completed[:, start:] == likely[:, start - 1 : -1]).all()


@pytest.mark.slow(reason="5 s: a model of its own")
@pytest.mark.parametrize("kind", [moe.Block, RoutedBlock], ids=["balance", "loss"])
def test_terms_of_the_loss_are_let_go(kind):
    """A model with routed experts; (carry, term) is what training takes of it, too."""
    cfg = replace(test_moe.CFG, vocab_size=11)
    rngs = nnx.Rngs(0)
    embed, block, head = decoder.Embed(cfg, rngs=rngs), kind(cfg, rngs=rngs), decoder.Head(cfg, rngs=rngs)
    completed = greedy([embed, block, head], [[1, 2, 3]], 3)
    carry, _ = block(embed(None, {"tokens": completed}), {})
    assert completed[0, 3:].tolist() == head(carry, {})[0, 2:-1].argmax(-1).tolist()


def test_layers_are_told_that_nobody_trains():
    seen = []

    def layer(carry, mb):
        seen.append((mb.training, mb.get("segments"), mb.key.shape))
        return jnp.zeros((*mb["tokens"].shape, 3)).at[..., 2].set(1)

    assert greedy([layer], [[0]], 2).tolist() == [[0, 2, 2]]
    assert set(seen) == {(False, None, ())}


def test_modules_that_are_called_otherwise_are_bound_to_how():
    def module(tokens, train):
        assert train is False
        return jnp.zeros((*tokens.shape, 3)).at[..., 2].set(1)

    layer = partial(lambda m, carry, mb: m(mb["tokens"], train=mb.training), module)
    assert greedy([layer], [[0]], 2).tolist() == [[0, 2, 2]]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[]]], ids=["no batch", "no token"])
def test_a_prompt_is_a_batch_of_tokens(layers, prompt):
    with pytest.raises(AssertionError):
        greedy(layers, prompt, 1)
