"""Autodiff: what a forward saves, what a call gives back unchanged, and the minimum cut between the two."""

from itertools import chain, combinations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.autodiff.split_backward import SINK, SOURCE, UNCUTTABLE, FlowNetwork
from rrfp_jax.runtime.autodiff.traced import inputs_of_outputs, output_dependence
from rrfp_jax.runtime.sizes import nbytes

ROWS, WIDTH = 16, 64


def norm(x):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def saved(function, dtype):
    """Specs of what is saved of `function(x @ a) @ b`, where x has arrived."""
    square, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype), jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)

    def stage(params, carry, inputs):
        a, b = params
        return [function(carry[0] @ a) @ b], None, None

    traced = differentiate(stage, [square, square], [x], [])
    assert not traced.prepare.outputs
    return traced.forward.outputs[traced.out :]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_norm_keeps_what_it_reads_as_it_came_and_two_columns(dtype):
    found = saved(norm, dtype)
    whole = [spec for spec in found if spec.size == ROWS * WIDTH]
    assert [spec.dtype for spec in whole] == [dtype]
    assert nbytes(found) <= nbytes(whole) + 3 * nbytes(jax.ShapeDtypeStruct((ROWS, 1), jnp.float32))


def test_what_is_narrow_is_saved_rather_than_what_it_becomes():
    (found,) = saved(lambda x: 3 * x.astype(jnp.float32) ** 2 + 1, jnp.bfloat16)
    assert (found.shape, found.dtype) == ((ROWS, WIDTH), jnp.bfloat16)


def test_what_is_costly_is_saved():
    found = saved(lambda x: jnp.tanh(x) + 1, jnp.float32)
    assert len(found) == 1  # not the product: its tanh would be done twice


def test_a_function_on_the_host_that_reads_nothing_is_called_once():
    def stage(params, carry, inputs):
        scale = jax.pure_callback(lambda: jnp.float32(3), jax.ShapeDtypeStruct((), jnp.float32))
        return [jnp.sin((carry[0] * scale) @ params[0])], None, None

    square, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (ROWS, 8)))
    traced = differentiate(stage, [square], [x], [])
    calls = [str(own.closed).count("pure_callback[") for own in (traced.forward, traced.backward)]
    assert calls == [1, 0]


def test_a_scale_that_is_costly_to_make_is_made_once_a_step():
    def stage(params, carry, inputs):
        return [jnp.sin(carry[0] * jnp.tanh(params[0]))], None, None

    x, scale = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    traced = differentiate(stage, [scale], [x], [])
    assert {spec.size for spec in traced.prepare.outputs} == {WIDTH}
    assert all(spec.size != WIDTH for spec in traced.forward.outputs[traced.out :])


def angles(length):
    return jnp.arange(length, dtype=jnp.float32)[:, None] * 100.0 ** -jnp.linspace(0, 1, WIDTH)


def test_a_table_of_positions_is_made_once_a_step():
    def stage(params, carry, inputs):
        return [carry[0] * jnp.cos(angles(ROWS)) @ params[0]], None, None

    square, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (2, ROWS, WIDTH)))
    traced = differentiate(stage, [square], [x], [])
    assert [spec.size for spec in traced.prepare.outputs] == [ROWS * WIDTH]
    programs = (traced.prepare, traced.forward, traced.backward)
    assert ["cos" in str(own.closed) for own in programs] == [True, False, False]


def test_a_table_is_kept_rather_than_what_a_microbatch_makes_of_it():
    def stage(params, carry, inputs):
        return [(carry[0] + jnp.cos(angles(ROWS))) @ params[0]], None, None

    square, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (1, ROWS, WIDTH)))
    traced = differentiate(stage, [square], [x], [])
    assert [spec.size for spec in traced.prepare.outputs] == [ROWS * WIDTH]
    assert len(traced.forward.outputs) == traced.out  # nothing is saved


@pytest.mark.parametrize("count, size", [(1, 5), (8, 1)], ids=["one", "together"])
def test_tables_that_are_larger_than_a_microbatch_are_made_where_they_are_needed(count, size):
    def stage(params, carry, inputs):
        for i in range(count):
            carry = [jnp.sin(jnp.cos(angles(size * ROWS) + i)[:ROWS] * carry[0])]
        return [carry[0] @ (1 + jnp.cos(angles(size * ROWS)).T)], None, None

    traced = differentiate(stage, [], [jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)], [])
    assert not traced.prepare.outputs
    assert ["cos" in str(own.closed) for own in (traced.forward, traced.backward)] == [True, True]


def test_what_is_prepared_is_read_by_a_task():
    def stage(params, carry, inputs):
        layer = jax.checkpoint(lambda w, x: x @ jax.scipy.linalg.expm(w / 3))
        return [layer(params[0], carry[0])], None, None

    square, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (ROWS, 8)))
    traced = differentiate(stage, [square], [x], [])
    prepared = range(1, traced.fixed)
    assert 0 < len(prepared) == len(traced.prepare.outputs)
    assert {*traced.forward.reads, *traced.backward.reads}.issuperset(prepared)


W, X = jnp.ones((3, 3)), jnp.ones(3)


@jax.custom_jvp
def own_jvp(w):
    return w, 2 * w


own_jvp.defjvp(lambda p, t: (own_jvp(*p), (t[0], 2 * t[0])))


@jax.custom_vjp
def own_vjp(w):
    return w, 2 * w


own_vjp.defvjp(lambda w: (own_vjp(w), None), lambda _, g: (g[0],))


def remat(f):
    return jax.checkpoint(f)


def twice(w):
    return w, 2 * w


def looped(body, w):
    return jax.lax.fori_loop(0, 3, lambda i, w: body(w), w)


WAYS = {  # of a matrix and a vector; which input the output is
    "itself": (lambda w, x: w, 0),
    "another input": (lambda w, x: x, 1),
    "computed": (lambda w, x: w + 0, None),
    "jit": (lambda w, x: jax.jit(remat(twice))(w)[0], 0),
    "jit, computed": (lambda w, x: jax.jit(remat(twice))(w)[1], None),
    "remat": (lambda w, x: remat(jax.jit(twice))(w)[0], 0),
    "custom_jvp": (lambda w, x: remat(own_jvp)(w)[0], 0),
    "custom_vjp": (lambda w, x: remat(own_vjp)(w)[0], 0),
    "custom_vjp, computed": (lambda w, x: remat(own_vjp)(w)[1], None),
    "scan": (lambda w, x: jax.lax.scan(lambda c, _: (remat(twice)(c)[0], None), w, length=3)[0], 0),
    "scan, computed": (
        lambda w, x: jax.lax.scan(lambda c, _: (remat(twice)(c)[1], None), w, length=3)[0],
        None,
    ),
    "rows of a scan": (lambda w, x: jax.lax.scan(lambda c, row: (c, remat(twice)(row)[0]), x, w)[1], 0),
    "rows of a scan, backwards": (
        lambda w, x: jax.lax.scan(lambda c, row: (c, remat(twice)(row)[0]), x, w, reverse=True)[1],
        0,
    ),
    "rows of a scan, computed": (
        lambda w, x: jax.lax.scan(lambda c, row: (c, remat(twice)(row)[1]), x, w)[1],
        None,
    ),
    "carried into rows": (lambda w, x: jax.lax.scan(lambda c, row: (row, remat(twice)(c)[0]), x, w)[1], None),
    "exchanged in a scan": (
        lambda w, x: jax.lax.scan(lambda c, _: ((c[1], remat(twice)(c[0])[0]), None), (w, 2 * w), length=2)[
            0
        ][0],
        None,
    ),
    "fori_loop": (lambda w, x: looped(lambda w: remat(twice)(w)[0], w), 0),
    "fori_loop, computed": (lambda w, x: looped(lambda w: remat(twice)(w)[1], w), None),
    "while": (
        lambda w, x: jax.lax.while_loop(
            lambda c: c[1].sum() < 9, lambda c: (remat(twice)(c[0])[0], 2 * c[1]), (w, x)
        )[0],
        0,
    ),
    "cond": (lambda w, x: jax.lax.cond(x.sum() > 0, lambda w: remat(twice)(w)[0], lambda w: w, w), 0),
    "cond, computed": (lambda w, x: jax.lax.cond(x.sum() > 0, lambda w: 2 * w, lambda w: w, w), None),
    "vmap": (lambda w, x: jax.vmap(lambda row: remat(twice)(row)[0], in_axes=1, out_axes=1)(w), 0),
    "transposed": (lambda w, x: w.T, None),
    "transposed, and back": (lambda w, x: jax.jit(jnp.transpose)(w.T), 0),
    "barrier": (lambda w, x: jax.lax.optimization_barrier((w, x))[0], 0),
    "another dtype": (lambda w, x: w.astype(jnp.bfloat16), None),
    "reduced": (lambda w, x: jax.lax.reduce(w, jnp.float32(0), lambda a, b: a, (0,)), None),
    "reduced over no axis": (lambda w, x: jax.lax.reduce(w, jnp.float32(0), lambda a, b: a + b, ()), None),
    "a constant": (lambda w, x: jnp.ones((3, 3)), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_which_input_an_output_is(way):
    function, expected = WAYS[way]
    assert inputs_of_outputs(jax.make_jaxpr(function)(W, X)) == [expected]


@pytest.mark.parametrize(
    "function",
    [
        jax.jit(lambda w, x: jnp.sin(w)),
        jax.checkpoint(lambda w, x: jnp.sin(w)),
        lambda w, x: jax.lax.scan(lambda c, row: (jnp.sin(c), None), w, x)[0],
        lambda w, x: jax.lax.cond(w.sum() > 0, lambda w, x: jnp.sin(w), lambda w, x: w, w, x),
    ],
    ids=["jit", "checkpoint", "scan", "cond"],
)
def test_an_output_does_not_follow_from_what_its_call_leaves_unused(function):
    assert output_dependence(jax.make_jaxpr(function)(W, X)) == [1]


@pytest.mark.parametrize(("impl", "expected"), [("threefry2x32", 0), ("rbg", None)])
def test_a_key_as_numbers_and_back(impl, expected):
    def unwrapped(numbers):
        key = jax.random.wrap_key_data(numbers, impl=impl)
        return jax.random.key_data(key if expected == 0 else jax.random.fold_in(key, 1))

    numbers = jax.random.key_data(jax.random.key(0, impl=impl))
    assert inputs_of_outputs(jax.make_jaxpr(unwrapped)(numbers)) == [expected]


NODES = (SOURCE, "a", "b", "c", "d", SINK)


def cost(edges, second):
    """Of the edges that lead to the sink's side."""
    return sum(capacity for tail, head, capacity in edges if head in second and tail not in second)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES), st.integers(0, 9)), max_size=16))
def test_against_all_cuts(drawn):
    edges = [(tail, head, capacity) for tail, head, capacity in drawn if tail != head]
    network = FlowNetwork()
    for edge in edges:
        network.edge(*edge)
    inner = NODES[1:-1]
    subsets = chain.from_iterable(combinations(inner, n) for n in range(len(inner) + 1))
    cuts = [{SINK, *subset} for subset in subsets]
    best = min(cost(edges, cut) for cut in cuts)
    found = network.sink_side()
    assert cost(edges, found) == best
    assert all(found <= cut for cut in cuts if cost(edges, cut) == best)


def test_what_cannot_be_cut_is_told():
    network = FlowNetwork()
    network.edge(SOURCE, "a")
    network.edge("a", SINK, 3)
    assert network.sink_side() == {SINK}
    network.edge("a", SINK, UNCUTTABLE)
    with pytest.raises(ValueError, match="both sides"):
        network.sink_side()
