from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import Block, Embed, GPTConfig, Head, causal_attention, float32_product, rms_norm, rope

CFG = GPTConfig(vocab_size=50, d_model=32, n_heads=4, d_ff=48, n_layers=2)
BF16 = replace(CFG, dtype=jnp.bfloat16)
TOKENS = jnp.array(np.random.default_rng(0).integers(0, 50, (2, 12)), jnp.int32)


def layers(cfg):
    kinds = [Embed, *[Block] * cfg.n_layers, Head]
    return [kind(cfg, rngs=nnx.Rngs(i)) for i, kind in enumerate(kinds)]


@partial(jax.jit, static_argnums=0)
def carries(cfg, tokens):
    """What each layer gives to the next; the logits last."""
    carry, seen = None, []
    for layer in layers(cfg):
        carry = layer(carry, {"tokens": tokens})
        seen.append(carry)
    return seen


@pytest.mark.parametrize(("cfg", "dtype"), [(CFG, "float32"), (BF16, "bfloat16")])
def test_shapes_and_dtypes(cfg, dtype):
    stream = ((2, 12, 32), dtype)
    found = [(carry.shape, str(carry.dtype)) for carry in jax.eval_shape(partial(carries, cfg), TOKENS)]
    assert found == [stream] * 3 + [((2, 12, 50), "float32")]
    states = jax.eval_shape(lambda: [nnx.state(layer) for layer in layers(cfg)])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(states)} == {"float32"}


@pytest.mark.slow(reason="3 s")
def test_bfloat16_is_close_to_float32():
    np.testing.assert_allclose(carries(BF16, TOKENS)[-1], carries(CFG, TOKENS)[-1], atol=0.15)


@pytest.mark.parametrize(("kind", "leaves"), [(Embed, 1), (Block, 6), (Head, 2)])
def test_modules_hold_parameters_only(kind, leaves):
    graph, params, rest = nnx.split(kind(CFG, rngs=nnx.Rngs(0)), nnx.Param, ...)
    assert len(jax.tree.leaves(params)) == leaves and not jax.tree.leaves(rest)
    assert graph == nnx.split(kind(CFG, rngs=nnx.Rngs(1)))[0]  # so equal layers share a compiled program
    hash(graph)


def test_a_token_changes_no_logits_before_it():
    before = carries(CFG, TOKENS)[-1]
    for t in (0, 5, 11):
        after = carries(CFG, TOKENS.at[0, t].add(1))[-1]
        np.testing.assert_array_equal(after[0, :t], before[0, :t])
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0, t:] != before[0, t:]).any(axis=-1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_their_gradients_are_multiplied_in_the_dtype_of_what_is_given(dtype):
    draw = np.random.default_rng(0)
    a, b = (jnp.array(draw.normal(size=shape), dtype) for shape in ((2, 5, 8), (2, 7, 8)))
    target = jnp.array(draw.normal(size=(2, 5, 7)), jnp.float32)

    def distance(product, a, b):
        return ((product(a, b) - target) ** 2).sum()

    def plain(a, b):
        return jnp.einsum("nik,njk->nij", a, b, preferred_element_type=jnp.float32)

    own = partial(distance, partial(float32_product, "nik,njk->nij"))
    assert own(a, b) == distance(plain, a, b)
    found, expected = (jax.grad(f, (0, 1))(a, b) for f in (own, partial(distance, plain)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        atol = 4 * float(jnp.finfo(dtype).eps) * float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=atol)
    equations = jax.make_jaxpr(jax.grad(own, (0, 1)))(a, b).eqns
    read = [var.aval.dtype for e in equations if e.primitive.name == "dot_general" for var in e.invars]
    assert read == [dtype] * 4


def test_rope_keeps_lengths_and_products_depend_on_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    turned_q, turned_k = (np.asarray(rope(jnp.broadcast_to(x, (1, 20, 1, 8))))[0, :, 0] for x in (q, k))
    np.testing.assert_allclose(np.linalg.norm(turned_q, axis=-1), np.linalg.norm(q), rtol=1e-5)
    np.testing.assert_array_equal(turned_q[0], q)
    products = turned_q @ turned_k.T
    for distance in (-7, 0, 1, 12):
        assert np.ptp(np.diagonal(products, distance)) < 1e-5
    assert np.ptp(products[0]) > 0.1


def test_attention_and_norm_against_loops():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4)).astype(np.float32)
    expected = np.zeros((1, 6, 2, 4))
    for t in range(6):
        for h in range(2):
            weight = np.exp(k[0, : t + 1, h] @ q[0, t, h] / 2)  # 2 is the root of the head size
            expected[0, t, h] = weight @ v[0, : t + 1, h] / weight.sum()
    np.testing.assert_allclose(jax.jit(causal_attention)(q, k, v), expected, atol=1e-5)
    normed = rms_norm(jnp.array([[3.0, 4.0]]), nnx.Param(jnp.array([1.0, 10.0])))
    np.testing.assert_allclose(normed, np.array([[3.0, 40.0]]) / 12.5**0.5, rtol=1e-5)


@pytest.mark.slow(reason="3 s: deep models")
def test_the_stream_keeps_its_scale_at_any_depth():
    for cfg in (CFG, replace(CFG, n_layers=6)):
        assert 0.9 < float(carries(cfg, TOKENS)[-2].std()) < 1.6


def test_gradients_reach_every_parameter():
    @jax.jit
    def gradients():
        graphs, params = zip(*(nnx.split(layer) for layer in layers(CFG)), strict=True)

        def loss(params):
            carry = None
            for graph, part in zip(graphs, params, strict=True):
                carry = nnx.merge(graph, part)(carry, {"tokens": TOKENS})
            return (carry**2).sum()

        return jax.tree.leaves(jax.grad(loss)(params))

    assert all(float(jnp.abs(gradient).max()) > 0 for gradient in gradients())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 30}, r"d_model=30, n_heads=4: rotary positions.*make d_model a multiple of 8"),
        ({"n_layers": 0}, r"n_layers=0: a size or scale must be positive; give n_layers > 0"),
        ({"init_scale": -1.0}, r"init_scale=-1.0: .*give init_scale > 0"),
        ({"dtype": "int32"}, r"dtype=int32: the model computes in floats; give float32 or bfloat16"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(CFG, **settings)
