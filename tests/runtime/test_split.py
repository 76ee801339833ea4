"""A backward in two programs: equal to the fused one, nothing expensive in both, little held between them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import rrfp_jax as rrfp
from benchmarks.backward import dot_flops, virtual_stage, weight_share
from configs.quickstart import pipeline
from models.gpt import GPTConfig
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.autodiff.residuals import check_remat, rematerialised
from rrfp_jax.runtime.autodiff.traced import BARRIER, inline
from rrfp_jax.runtime.model.layers import MicrobatchView
from tests.support.stages import (
    DEPTH,
    ROWS,
    UNARY,
    WIDTH,
    dense,
    from_recipe,
    halved,
    norm,
    outputs_equal,
    tallies,
)

pytestmark = pytest.mark.optimized

SMALL = {"d_model": 32, "n_heads": 2, "d_ff": 64, "n_layers": 2, "vocab_size": 32}
BLOCK, HEAD = range(2, 3), range(2, 4)  # of embedding, two blocks, head; the head's with the block before it
BATCH, LENGTH = 2, 16
SQUARE = (WIDTH, WIDTH)
CARRY = [(ROWS, WIDTH), np.array([1, 0, 3, 2])]


def complete(found, tolerance=0.0):
    """The halves give what the fused backward gives, and do between them what it does, once."""
    outputs_equal(*found.gradients(), tolerance)
    traced = found.traced
    assert tallies(traced.input) + tallies(traced.weight) == tallies(traced.backward)


@pytest.mark.parametrize(
    ("dtype", "remat", "layers"),
    [
        (jnp.float32, "none", HEAD),
        (jnp.float32, "full", BLOCK),
        (jnp.bfloat16, "full", BLOCK),
    ],
)
def test_transformer(dtype, remat, layers):
    found = virtual_stage(GPTConfig(dtype=dtype, **SMALL), layers, remat, BATCH, LENGTH)
    complete(found)
    assert weight_share(found, BATCH * LENGTH) >= 95
    assert found.flops("input") + found.flops("weight") <= 1.02 * found.flops("backward")


@pytest.mark.slow(reason="8 s: optimized programs; test_transformer has the same layers one by one")
@pytest.mark.parametrize(
    ("dtype", "remat", "most"),
    [(jnp.float32, "full", 1.02), (jnp.bfloat16, "none", 1.07)],  # more conversions, see results/decisions.md
)
def test_transformer_in_a_loop(dtype, remat, most):
    pipe = pipeline(GPTConfig(dtype=dtype, **SMALL))
    field = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    mask = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.float32)
    shapes = pipe.shapes({"tokens": field, "labels": field, "mask": mask})[1]
    leaves, structure = jax.tree.flatten(shapes.params)
    block = rematerialised(partial(pipe.apply_layer, 1), remat)

    def stage(params, carry, inputs):
        def body(x, own):
            return block(jax.tree.unflatten(structure, own), x, MicrobatchView({}, inputs[0], 1))[0], None

        return [jax.lax.scan(body, carry[0], params)[0]], None, None

    carry = jnp.ones(shapes.carry_out.shape, dtype)
    stacked = [(DEPTH, *leaf.shape) for leaf in leaves]
    found = halved(stage, stacked, [carry.at[:, ::2].set(-2)], [np.zeros(3, np.uint32)])
    complete(found)
    elements = DEPTH * sum(leaf.size for leaf in leaves if leaf.ndim == 2)
    assert dot_flops(found.traced.weight.closed) == 2 * BATCH * LENGTH * elements
    assert found.flops("input") + found.flops("weight") <= most * found.flops("backward")


@pytest.mark.parametrize("name", UNARY)
def test_each_kind_of_layer(name):
    stage, shapes = from_recipe([(name, 0, 0, False), (name, 1, 0, True)], loss=False)
    found = halved(stage, shapes, CARRY)
    complete(found)
    if any(len(shape) > 1 for shape in shapes) and name not in ("cond", "through"):
        assert dot_flops(found.traced.weight.closed) > 0


steps = st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 3), st.integers(0, 3), st.booleans())


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=2, max_size=4), st.booleans())
def test_stages_drawn_at_random(recipe, loss):
    stage, shapes = from_recipe(recipe, loss)
    complete(halved(stage, shapes, CARRY), tolerance=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_over_layers_is_split_too(remat):
    stage, shapes = from_recipe([("rematscan" if remat else "scan", 0, 0, False)], loss=False)
    traced = halved(stage, shapes, CARRY).traced
    products = 2 * ROWS * WIDTH * WIDTH * DEPTH
    assert dot_flops(traced.weight.closed) == products
    assert dot_flops(traced.backward.closed) == (3 if remat else 2) * products


def test_inlined_programs_call_none_and_keep_the_barrier():
    stage, shapes = from_recipe(
        [("remat", 0, 0, False), ("jit", 1, 0, False), ("custom", 2, 0, False)], False
    )
    flat = inline(halved(stage, shapes, CARRY).traced.backward.closed)
    names = [equation.primitive.name for equation in flat.jaxpr.eqns]
    assert BARRIER in names and not {"jit", "pjit", "remat2", "checkpoint", "custom_vjp_call"} & set(names)


def two_norms(params, carry, inputs):
    matrix, scale, last = params
    return [dense(last, norm(scale, dense(matrix, carry[0])))], None, None


def test_what_a_scale_needs_crosses_over_as_one_row():
    found = halved(two_norms, [SQUARE, (WIDTH,), SQUARE], [(ROWS, WIDTH)])
    assert (WIDTH,) in [var.aval.shape for var in found.traced.input.closed.jaxpr.outvars]
    rows = 4 * ROWS * WIDTH  # for each matrix, what it is multiplied with and the cotangent
    assert found.held_after_input() == 4 * (rows + WIDTH)


def of_weights(remat):
    def layer(logits, x):
        return jnp.tanh(x @ jax.nn.softmax(logits))

    def stage(params, carry, inputs):
        wrapped = rematerialised(layer, remat)
        return [wrapped(params[1], wrapped(params[0], carry[0]))], None, None

    return halved(stage, [SQUARE] * 2, [(ROWS, WIDTH)])


def test_what_weights_alone_give_is_prepared_once_a_step():
    none, full = of_weights("none"), of_weights("full")
    complete(full)
    outputs_equal(none.run("backward"), full.run("backward"), 1e-6)
    assert tallies(full.traced.prepare)["exp"] == 2
    for program in (full.traced.backward, full.traced.input, full.traced.weight):
        assert tallies(program)["exp"] == 0
    assert all(var.aval.shape != SQUARE for var in full.traced.input.closed.jaxpr.outvars)


def three_layers(params, carry, inputs):
    x = carry[0]
    for matrix in params:
        x = dense(matrix, x)
    return [x], None, None


def test_frozen_parameters_have_no_gradient_and_no_products():
    every = halved(three_layers, [SQUARE] * 3, [(ROWS, WIDTH)])
    some = halved(three_layers, [SQUARE] * 3, [(ROWS, WIDTH)], trainable=[True, False, True])
    complete(some)
    expected = every.run("backward")
    outputs_equal([expected[i] for i in (0, 1, 3)], some.run("backward"))
    product = 2 * ROWS * WIDTH * WIDTH
    assert dot_flops(some.traced.weight.closed) == 2 * product
    assert dot_flops(some.traced.backward.closed) == 5 * product


def test_nothing_is_done_or_saved_below_the_first_trainable_layer():
    frozen = {"trainable": [False, False, True], "carry_gradients": ()}
    every, some = (halved(three_layers, [SQUARE] * 3, [(ROWS, WIDTH)], **kw) for kw in ({}, frozen))
    outputs_equal(every.run("backward")[3:], some.run("backward"))
    assert dot_flops(some.traced.backward.closed) == 2 * ROWS * WIDTH * WIDTH
    assert not {0, 1} & set(some.traced.backward.reads)
    assert some.held_after_forward() <= every.held_after_forward() / 2


def test_a_stage_with_nothing_to_train_has_no_backward():
    frozen = {"trainable": [False] * 3, "carry_gradients": ()}
    traced = halved(three_layers, [SQUARE] * 3, [(ROWS, WIDTH)], **frozen).traced
    assert not traced.backward.closed.jaxpr.outvars
    assert len(traced.forward.closed.jaxpr.outvars) == traced.out


def test_full_rematerialisation_holds_the_input_only_until_the_backward():
    none, full = (
        virtual_stage(GPTConfig(**SMALL), BLOCK, remat, BATCH, LENGTH) for remat in ("none", "full")
    )
    stream = BATCH * LENGTH * SMALL["d_model"] * 4
    assert full.held_after_forward() == stream
    assert none.held_after_forward() > 6 * stream
    outputs_equal(none.run("backward"), full.run("backward"), 1e-6)


def test_an_unknown_policy_is_refused():
    with pytest.raises(UsageError, match="remat='all': unknown; give one of: none, full, every"):
        check_remat("all")
    assert rematerialised(dense, "none") is dense


def test_tracing_the_halves_waits_until_they_are_asked_for(monkeypatch):
    stage, shapes = from_recipe([("dense", 0, 0, False)], loss=False)
    monkeypatch.setattr(
        "rrfp_jax.runtime.autodiff.differentiate.split", lambda *args: pytest.fail("split at once")
    )
    halved(stage, shapes, CARRY)


def _maximum(params, x, n):
    return jnp.maximum(x / params[0], 0)


def _maximum_of_data(params, x, n):
    return jnp.maximum(x * params[0] / n, 0)


def _largest(params, x, n):
    return (x / params[0]).max(-1)


def _where_largest(params, x, n):
    y = x / params[0]
    return jnp.where(y >= y.max(-1, keepdims=True), y, 0)


@jax.checkpoint
def _largest_weight(params, x, n):
    return x[:, : params[1].shape[1]] * (params[1] / params[0]).max(0)


@pytest.mark.parametrize(
    "layer",
    [_maximum, _maximum_of_data, _largest, _where_largest, _largest_weight, jax.checkpoint(_maximum)],
)
def test_a_comparison_in_a_backward_is_of_the_forwards_numbers(layer):
    """The quotients by a number that XLA takes for products with its reciprocal in one program alone."""

    def plain(params, carry, inputs):
        return layer(params, jnp.tanh(carry[0]) @ params[2], inputs[0])

    def stage(params, carry, inputs):
        return [plain(params, carry, inputs)], None, None

    divisor, n = np.float32(0.7), np.float32(3)
    found = halved(stage, [divisor, (256, 16), (16, 16)], [(64, 16)], [n])
    fused, halves = found.gradients()
    given = found.arguments[found.traced.cotangents]
    _, pull = jax.vjp(lambda params, x: plain(params, [x], found.arrived[1:]), found.params, found.arrived[0])
    gradients, of_carry = pull(given)
    expected = [of_carry, *gradients]
    outputs_equal(expected, fused, tolerance=1e-5)
    outputs_equal(expected, halves, tolerance=1e-5)


class Standardised(nnx.Module):
    """Divides by the largest of its standardised weights, and tells how many there are of these: one."""

    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (256,)))

    def __call__(self, x, mb):
        standard = (self.w - self.w.mean()) / self.w.std()
        most = standard.max()
        largest = standard >= most
        return x / most + largest, rrfp.Loss(0.0, 0.0, {"largest": rrfp.Max(largest.sum())})


@pytest.mark.parametrize("seed", [4, 22, 32])
def test_a_comparison_of_weights_in_a_forward_is_of_numbers_of_one_rounding(seed):
    """Of what is prepared once a step, and of the same computed again in the forward."""
    weights = np.random.default_rng(seed).normal(size=256).astype(np.float32)

    def gain(g, x, mb):
        return (mb["x"] if x is None else x) * g

    def loss(x, mb):
        return rrfp.Loss((x**2).sum(), weight=x.shape[0])

    ends = rrfp.layer(gain, init=lambda key: jnp.ones(256))
    trainer = rrfp.Trainer(
        rrfp.Pipeline([ends, rrfp.layer(Standardised), ends], loss),
        optax.sgd(0.0),
        mesh=rrfp.Mesh(pp=2),
        init=lambda path, spec: weights if path == "1.w" else None,
    )
    batch = [{"x": np.ones((4, 256), np.float32) * 0.01}] * 2
    assert trainer.step(batch).metrics["largest"] == trainer.evaluate(batch).metrics["largest"] == 1.0
