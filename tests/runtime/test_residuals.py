"""What a forward saves for its backward: the fewest bytes from which the rest follows cheaply."""

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.runtime.autodiff.differentiate import differentiate
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
    assert traced.prepare is None
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


def test_a_scale_that_is_costly_to_make_is_made_once_a_step():
    def stage(params, carry, inputs):
        return [jnp.sin(carry[0] * jnp.tanh(params[0]))], None, None

    x, scale = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    traced = differentiate(stage, [scale], [x], [])
    assert {spec.size for spec in traced.prepare.outputs} == {WIDTH}
    assert all(spec.size != WIDTH for spec in traced.forward.outputs[traced.out :])
