"""Temporaries that are predicted, against XLA's habits one by one, and against what it said for an H100."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import gpt3_large, llama3_70b, qwen3_4b
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT
from rrfp_jax.data.contract import as_data, buckets_of, plan_step
from rrfp_jax.forecast.layer_costs import ModelCosts
from rrfp_jax.forecast.temporaries import first_bytes, temporary_bytes

N = 64
SINGLE = jax.ShapeDtypeStruct((N, N), jnp.float32)
HALF = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
BYTES = 2 * N * N  # of HALF


def temporaries(function, *specs):
    return temporary_bytes(jax.make_jaxpr(function)(*specs))


def test_end_with_their_last_use():
    def chain(x):
        a = x @ x
        b = a @ a
        return b @ b

    assert temporaries(chain, HALF) == 2 * BYTES
    assert temporaries(lambda x: x, HALF) == 0


def test_what_is_elementwise_takes_the_place_of_what_it_reads_last():
    assert temporaries(lambda x: jnp.tanh(2 * (x @ x)) @ x, SINGLE) == 2 * BYTES
    assert temporaries(lambda x: (y := x @ x) @ jnp.tanh(y), SINGLE) == 4 * BYTES
    assert temporaries(lambda x, w: (x @ x).astype(jnp.float32) @ w, HALF, SINGLE) == 3 * BYTES  # wider
    row_and_its_index = 4 * N + 4
    scatter = temporaries(lambda x: jnp.zeros_like(x).at[0].add(1.0) @ x, SINGLE)
    assert scatter == 2 * BYTES + row_and_its_index


def test_products_are_written_as_what_only_converts_them():
    def product(x):
        return jnp.matmul(x, x, preferred_element_type=jnp.float32)

    assert temporaries(lambda x: product(x).astype(jnp.bfloat16) @ x, HALF) == BYTES
    assert temporaries(lambda x: (product(x).astype(jnp.bfloat16) @ x, product(x)), HALF) == BYTES
    both = temporaries(lambda x: ((y := product(x)).astype(jnp.bfloat16) @ x, jnp.sum(y)), HALF)
    assert both == 3 * BYTES  # something else reads it as it is
    assert temporaries(lambda x: (x @ x).T.astype(jnp.float32), HALF) == 0  # a result


def test_products_convert_arguments_that_nothing_else_reads_converted():
    assert temporaries(lambda x, w: x @ w.astype(jnp.bfloat16), HALF, SINGLE) == 0
    assert temporaries(lambda x, w: x @ (y := w.astype(jnp.bfloat16)) @ y, HALF, SINGLE) == 2 * BYTES


def test_what_reads_the_same_is_made_together():
    def second(kept, x):
        return (jnp.sin(kept) * (x @ x)).astype(jnp.bfloat16) @ x

    def both(kept, x):
        return jnp.exp(kept).astype(jnp.bfloat16) @ x, second(kept, x)

    assert temporaries(second, SINGLE, HALF) == BYTES
    assert temporaries(both, SINGLE, HALF) == 2 * BYTES  # the first is there until the second is made


def test_a_kernel_that_reduces_what_it_reads_cannot_write_there():
    def gradient(scores, x):
        by_row = (scores @ x) * 2
        return (by_row - by_row.sum(-1, keepdims=True)) @ x

    without = temporaries(lambda scores, x: ((scores @ x) * 2) @ x, SINGLE, SINGLE)
    assert temporaries(gradient, SINGLE, SINGLE) == without + 2 * BYTES + 4 * N


def test_gradients_that_are_added_at_once_are_there_one_by_one():
    products = jax.make_jaxpr(lambda x, y: (x @ y, (y @ x).astype(jnp.float32)))(HALF, HALF)
    assert [temporary_bytes(products, added) for added in (0, 1, 2)] == [0, BYTES, BYTES]
    embedding = jax.make_jaxpr(lambda x, rows: jnp.zeros_like(x).at[rows].add(x).astype(jnp.float32))
    of_rows = embedding(HALF, jax.ShapeDtypeStruct((N,), jnp.int32))
    assert [first_bytes(of_rows, added) for added in (0, 1)] == [0, BYTES]
    assert first_bytes(products, 2) == 0


SAID = {  # by config and remat: by layer what XLA says of the largest program of its stage (MiB)
    (gpt3_large, "none"): {"block": {"F": 512, "B": 537, "I": 512}, "head": {"F": 787, "B": 1179}},
    (gpt3_large, "full"): {"block": {"F": 780, "B": 1089}, "head": {"F": 787, "B": 1178}},
    (qwen3_4b, "none"): {"block": {"F": 2048, "I": 2090}, "head": {"F": 2380, "I": 2377}},
    (qwen3_4b, "full"): {"block": {"F": 3121, "B": 4409}},
    (llama3_70b, "none"): {"block": {"F": 1072, "I": 1025}, "head": {"F": 1064}},
    (llama3_70b, "full"): {"block": {"F": 1548, "B": 2545}},
}
"""jax 0.10.2 with CUDA 12."""


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case[0].__name__.partition('.')[2]}-{case[1]}")
def test_near_what_xla_says_for_an_h100(case):
    of, remat = case
    config = of.get_config()
    short = dataclasses.replace(config.model, n_layers=1)
    config = dataclasses.replace(config, model=short, remat=remat)
    bucket = buckets_of(plan_step(as_data(config.train_data()), 0))[0]
    kinds = [BACKWARD, INPUT, WEIGHT]
    model = ModelCosts.of(config.pipeline(), [bucket], None, kinds=kinds, remat=remat)
    _, block, head = model.layers[bucket]
    for name, layer in {"block": block, "head": head}.items():
        for letter, said in SAID[case].get(name, {}).items():
            predicted = layer.footprint.temporary_bytes[letter] / 2**20
            assert predicted == pytest.approx(said, rel=0.10), (name, letter)
