"""Temporaries that are predicted, against XLA's habits one by one.

What XLA says of whole models is in tests/benchmarks/test_foreseen_bytes.py.
"""

import jax
import jax.numpy as jnp

from rrfp_jax.forecast.temporaries import first_bytes, temporaries_of, temporary_bytes

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


def test_rows_are_taken_of_a_table_before_they_are_converted():
    rows = jnp.arange(2)
    assert temporaries(lambda table: table.astype(jnp.bfloat16)[rows] * 2, SINGLE) < BYTES // 2
    both = temporaries(lambda table: (y := table.astype(jnp.bfloat16))[rows] @ y, SINGLE)
    assert both > BYTES  # a product reads all of it


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


def test_a_place_that_is_free_takes_the_largest_that_fits():
    program = temporaries_of(
        jax.make_jaxpr(lambda x: ((x @ x) @ x).astype(jnp.float32) @ x.astype(jnp.float32))(HALF)
    )
    assert program.most() == max(map(sum, program.moments))
    assert program.most(spare=BYTES - 1) == program.most()
    assert program.most(spare=2 * BYTES) == program.most() - 2 * BYTES


def test_what_gradients_are_made_of_is_kept_till_they_are_computed():
    def backward(narrow, wide):
        product = narrow @ narrow  # 1 part
        return product @ narrow, product.T @ wide  # of which the second is a gradient of 4 parts

    traced = jax.make_jaxpr(backward)(HALF, jax.ShapeDtypeStruct((N, 4 * N), jnp.bfloat16))
    alone, shared = (temporaries_of(traced, added=1, several=several) for several in (False, True))
    assert (alone.late, alone.waiting_bytes) == ([(3 * BYTES, BYTES)], 0)
    assert (shared.late, shared.waiting_bytes) == ([], 5 * BYTES)
    assert alone.steepest == 3 * BYTES


def test_of_several_devices_a_result_takes_the_place_of_what_it_is_made_of():
    traced = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(SINGLE)
    assert [temporaries_of(traced, several=several).most() for several in (False, True)] == [2 * BYTES, 0]
