"""The published decoders at a tiny size: shapes, causality, shared heads, tied embeddings."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from models.decoder import Block, DecoderConfig, Embed, Head
from models.gpt import rope

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_size": 6, "d_ff": 48}
QWEN = DecoderConfig(**SIZES, vocab_size=50, qk_norm=True, dtype=jnp.float32, init_scale=0.2)
GPT3 = replace(
    QWEN,
    n_kv_heads=4,
    norm="layer",
    gated=False,
    biases=True,
    qk_norm=False,
    positions="learned",
    max_length=12,
)
TOKENS = jnp.array(np.random.default_rng(0).integers(0, 50, (2, 12)), jnp.int32)


def logits(cfg, tokens, segments=None, **fields):
    mb = {"tokens": tokens} | fields | ({} if segments is None else {"segments": segments})
    carry = None
    for i, kind in enumerate([Embed, *[Block] * cfg.n_layers, Head]):
        carry = kind(cfg, rngs=nnx.Rngs(i))(carry, mb)
    return carry


@pytest.mark.parametrize("cfg", [QWEN, GPT3], ids=["qwen", "gpt3"])
def test_a_token_changes_no_logits_before_it(cfg):
    before = logits(cfg, TOKENS)
    assert (before.shape, before.dtype) == ((2, 12, 50), jnp.float32)
    after = logits(cfg, TOKENS.at[0, 5].add(1))
    np.testing.assert_array_equal(after[0, :5], before[0, :5])
    np.testing.assert_array_equal(after[1], before[1])
    assert (after[0, 5:] != before[0, 5:]).any(axis=-1).all()


def test_no_attention_between_segments():
    segments = jnp.array([[0] * 5 + [1] * 7] * 2)
    before, after = (logits(QWEN, tokens, segments) for tokens in (TOKENS, TOKENS.at[0, 2].add(1)))
    np.testing.assert_array_equal(after[0, 5:], before[0, 5:])


def test_the_loss_of_packed_documents_is_that_of_a_row_each():
    """The second document of a row has the positions of one that begins the row."""
    packed = {
        "segments": jnp.array([[1] * 5 + [2] * 7] * 2),
        "positions": jnp.array([[*range(5), *range(7)]] * 2),
    }
    labels = jnp.roll(TOKENS, -1, axis=1)

    def loss(cfg, at, **fields):
        found = logits(cfg, TOKENS[:, at], **fields)
        return float(optax.softmax_cross_entropy_with_integer_labels(found, labels[:, at]).sum())

    for cfg in (QWEN, GPT3):  # rotary positions, learned ones
        alone = loss(cfg, slice(5)) + loss(cfg, slice(5, 12))
        np.testing.assert_allclose(loss(cfg, slice(12), **packed), alone, rtol=1e-5)
    with pytest.raises(AssertionError, match="shape"):
        logits(GPT3, TOKENS, positions=jnp.arange(12))


def test_shared_heads_are_equal_heads():
    """Two key and value heads for four are four that are equal in pairs."""
    shared, apart = Block(QWEN, rngs=nnx.Rngs(0)), Block(replace(QWEN, n_kv_heads=4), rngs=nnx.Rngs(0))
    state = nnx.state(shared)
    kernel = state["attention"]["key_value"]["kernel"][...].reshape(32, 2, 2, 6)  # [D, keys or values, G, K]
    state["attention"]["key_value"]["kernel"] = nnx.Param(jnp.repeat(kernel, 2, axis=2).reshape(32, -1))
    nnx.update(apart, state)
    x = jax.random.normal(jax.random.key(1), (2, 12, 32))
    np.testing.assert_allclose(shared(x, {}), apart(x, {}), atol=1e-6)


def test_embedding_and_head_can_be_tied():
    layers = [rrfp.layer(Embed, QWEN), rrfp.layer(Block, QWEN, repeat=2), rrfp.layer(Head, QWEN)]
    tied = {"0.tokens.embedding": "-1.tokens.embedding"}

    def loss(x, mb):
        return rrfp.Loss((x**2).sum(), weight=1.0)

    fields = {"tokens": jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)}
    shapes = rrfp.Pipeline(layers, loss, tied=tied).shapes(fields)
    assert shapes[0].params["tokens"] == shapes[-1].params["tokens"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_kv_heads": 3}, "n_heads=4 is no multiple of n_kv_heads=3"),
        ({"d_ff": 0}, "d_ff=0"),
        ({"positions": "learned"}, "max_length=0"),
        ({"causal": False}, "causal=False: the explicit attention is causal"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(QWEN, **changes)


@pytest.mark.parametrize(
    ("platform", "changes", "chosen"),
    [
        ("gpu", {}, "cudnn"),
        ("cpu", {}, "xla"),
        ("gpu", {"dtype": jnp.float32}, "xla"),
        ("gpu", {"head_size": 12}, "xla"),
        ("gpu", {"segments": True}, "xla"),
    ],
)
def test_attention_for_the_devices_that_are_traced_for(platform, changes, chosen, monkeypatch):
    asked = []

    def attention(q, k, v, implementation, **_):
        asked.append(implementation)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    device = jax.sharding.AbstractDevice("some card", None, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("tp",), abstract_device=device)
    known = {"dtype": jnp.bfloat16, "head_size": 16, "attention": "auto"} | changes
    carry = jnp.zeros((1, 4, QWEN.d_model), known["dtype"])
    mb = {"segments": jnp.zeros((1, 4), jnp.int32)} if known.pop("segments", False) else {}
    block = Block(replace(QWEN, **known), rngs=nnx.Rngs(0))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda x: block(x, mb), carry)
    assert asked == [chosen]


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": False, "norm": "layer", "biases": True}], ids=["rms", "layer"]
)
def test_attention_of_jax_is_the_explicit_one(changes):
    explicit = replace(QWEN, **changes)
    segments = jnp.array([[0] * 5 + [1] * 7] * 2)
    for of in (None, segments):
        expected = logits(explicit, TOKENS, of)
        np.testing.assert_allclose(
            logits(replace(explicit, attention="xla"), TOKENS, of), expected, atol=1e-5
        )


def test_parallel_halves_read_the_same():
    """Attention and MLP of a parallel block both read its one normed stream."""
    block = Block(replace(QWEN, parallel=True), rngs=nnx.Rngs(0))
    assert block.mlp_norm is None
    x = jax.random.normal(jax.random.key(1), (2, 12, 32))
    normed = block.attention_norm(x)
    expected = x + block.attention(normed, None, partial(rope, base=QWEN.rope_base)) + block.mlp(normed)
    np.testing.assert_allclose(block(x, {}), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("cfg", "tokens", "segments", "said"),
    [
        (GPT3, jnp.zeros((2, 13), jnp.int32), None, "13"),  # the thirteenth has no learned position
        (QWEN, jnp.zeros((2, 3, 4), jnp.int32), None, "rank"),
        (QWEN, TOKENS, jnp.zeros((2, 1), jnp.int32), "shape"),
        (QWEN, TOKENS, jnp.zeros((1, 12), jnp.int32), "shape"),
        (replace(QWEN, attention="xla"), TOKENS, jnp.zeros((1, 12), jnp.int32), "shape"),
    ],
    ids=["longer than positions", "rank", "one segment a sequence", "of one sequence", "of one, xla"],
)
def test_what_would_be_broadcast_or_clipped_in_silence_is_refused(cfg, tokens, segments, said):
    with pytest.raises(AssertionError, match=said):
        logits(cfg, tokens, segments)
