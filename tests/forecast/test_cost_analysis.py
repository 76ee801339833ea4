"""What programs and layers are predicted to cost, against what is known of them."""

import jax
import jax.numpy as jnp
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT
from rrfp_jax.data.contract import bucket_of
from rrfp_jax.forecast.cost_analysis import program_cost
from rrfp_jax.forecast.costs import ModelCosts
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS, Accelerator, Link, accelerator_of_kind
from rrfp_jax.runtime.engine.settings import Settings
from tests.support import toy

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
HALF = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
BYTES = 4 * N * N


def cost(function, *specs):
    return program_cost(jax.make_jaxpr(function)(*specs))


def test_a_product():
    found = cost(jnp.matmul, SQUARE, SQUARE)
    assert found.flops == {"float32": 2 * N**3}
    assert (found.bytes, found.temp_size_in_bytes) == (3 * BYTES, 0)


def test_products_by_dtype():
    found = cost(lambda a, b, c, d: (a @ b, c @ d), SQUARE, SQUARE, HALF, HALF)
    assert found.flops == {"float32": 2 * N**3, "bfloat16": 2 * N**3}


def test_a_convolution_is_a_product():
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 3, 8, 8), (16, 3, 2, 2)))
    found = cost(lambda a, b, c: (jax.lax.conv(a, b, (2, 2), "VALID"), c @ c), image, kernel, SQUARE)
    assert found.flops == {"bfloat16": 2 * 16 * 4 * 4 * 3 * 2 * 2, "float32": 2 * N**3}


def test_elementwise_operations_are_fused():
    chain = cost(lambda x: jnp.tanh(2 * x + 1).sum(-1), SQUARE)
    assert chain.bytes == BYTES + 4 * N  # read once, a column written
    into_product = cost(lambda x, w: jnp.tanh(x) @ w, SQUARE, SQUARE)
    assert into_product.bytes == 5 * BYTES  # tanh reads and writes, the product reads both and writes
    softmax = cost(jax.nn.softmax, SQUARE)
    assert 4 * BYTES <= softmax.bytes <= 4.2 * BYTES  # read for maximum, sum and result, and written


def test_gather_reads_what_it_takes():
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert cost(lambda table, rows: table[rows], SQUARE, rows).bytes < BYTES / 4


def test_scans_count_as_often_as_they_run():
    def loop(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    one, eight = (cost(loop, SQUARE, jax.ShapeDtypeStruct((n, N, N), jnp.float32)) for n in (1, 8))
    assert eight.flops["float32"] == pytest.approx(8 * one.flops["float32"], rel=1e-3)
    assert eight.bytes == 8 * one.bytes
    assert eight.temp_size_in_bytes == one.temp_size_in_bytes == BYTES


def test_scans_within_scans():
    def often(function, times):
        return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, None, length=times)[0]

    for times in (1, 4):
        found = cost(often(often(lambda x: x @ x, 16), times), SQUARE)
        assert found.flops["float32"] == pytest.approx(16 * times * 2 * N**3, rel=1e-3)


def test_temporaries_are_near_what_xla_says():
    def attention(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    long = jax.ShapeDtypeStruct((512, N), jnp.float32)
    forward = jax.jit(attention).lower(long, long, long).compile().memory_analysis().temp_size_in_bytes
    assert forward <= cost(attention, long, long, long).temp_size_in_bytes <= 3.5 * forward


def test_temporaries_end_with_their_last_use():
    def chain(x):
        a = x @ x
        b = a @ a
        return b @ b

    assert cost(chain, SQUARE).temp_size_in_bytes == 2 * BYTES
    assert cost(lambda x: x, SQUARE).temp_size_in_bytes == 0


def test_gradients_that_are_added_at_once_are_there_one_by_one():
    products = jax.make_jaxpr(lambda x, y: (x @ y, y @ x))(SQUARE, SQUARE)
    assert [program_cost(products, added).temp_size_in_bytes for added in (0, 1, 2)] == [0, BYTES, BYTES]


def test_accelerators():
    accelerator = Accelerator(
        name="x", half=4.0, single=2.0, bytes_per_second=10.0, memory=None, link="loopback", source=""
    )
    assert accelerator.seconds({"bfloat16": 8, "float16": 4, "float32": 2}, 20) == 2 + 1 + 1 + 2
    assert accelerator.at(0.5).seconds({"float32": 2}, 20) == 2 * accelerator.seconds({"float32": 2}, 20)
    assert Link(bytes_per_second=4.0, latency=1.0).seconds(8) == 3
    assert all(known.link in LINKS and name == known.name for name, known in ACCELERATORS.items())
    assert (
        accelerator_of_kind("NVIDIA H200") is ACCELERATORS["h200"] and accelerator_of_kind("abacus") is None
    )


def test_a_loop_inside_a_layer():
    """A layer that is a scan over blocks costs what they cost one after the other."""

    def init(key, blocks):
        return {"w": jax.random.normal(key, (blocks, N, N))}

    def looped(params, carry, mb):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), mb["x"], params["w"])[0]

    def in_a_row(params, carry, mb):
        x = mb["x"]
        for i in range(4):
            x = jnp.tanh(x @ params["w"][i])
        return x

    def loss(x, mb):
        return rrfp.Loss((x**2).sum(), weight=1.0)

    costs = []
    for function in (looped, in_a_row):
        pipe = rrfp.Pipeline([rrfp.layer(function, init=lambda key: init(key, 4))], loss)
        model = ModelCosts.of(pipe, [(("x", (N, N), "float32"),)], None, Settings(), [BACKWARD])
        ((layer,),) = model.layers.values()
        costs.append([sum(layer.programs[kind].flops.values()) for kind in (FORWARD, BACKWARD)])
    assert costs[0][0] == pytest.approx(costs[1][0], rel=0.03)
    assert costs[0][1] == pytest.approx(costs[1][1], rel=0.15)  # of the loop: one product for the data, too


def test_a_backward_in_halves_costs_what_they_cost():
    pipe, bucket = toy.pipeline(), bucket_of(toy.microbatches(1)[0])
    whole, halves = (
        ModelCosts.of(pipe, [bucket], None, Settings(equal_schedules=halves), [BACKWARD])
        for halves in (False, True)
    )
    for fused, split in zip(whole.layers[bucket], halves.layers[bucket], strict=True):
        parts = [split.programs[kind] for kind in (INPUT, WEIGHT)]
        assert (
            split.programs[BACKWARD].bytes
            == sum(part.bytes for part in parts)
            >= fused.programs[BACKWARD].bytes
        )
        assert split.programs[BACKWARD].temp_size_in_bytes == max(part.temp_size_in_bytes for part in parts)
