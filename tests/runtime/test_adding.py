"""A program that adds its gradients gives the bits of one that stores them, and of an addition after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.runtime.programs.gradients import added, adding

pytestmark = pytest.mark.optimized

draw = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return draw.standard_normal(shape).astype(np.float32).astype(dtype)


def scattered(rows, values):
    return jnp.zeros((4, values.shape[1])).at[(rows[:, 0] * 2).astype(int) % 4].add(values * 3)


def stacked(x, y):
    return jax.lax.scan(lambda carry, rows: (carry, rows[0] * rows[1]), 0, (x, y))[1]


def summed(x, y):
    return jax.lax.scan(lambda total, rows: (total + rows[0] * rows[1], None), jnp.zeros(33), (x, y))[0]


GRADIENTS = {  # of two arrays
    "product": (jnp.multiply, normal(64, 33), normal(64, 33)),
    "bias of one row": (lambda x, y: (x * y).sum(0), normal(1, 33), normal(1, 33)),
    "bias": (lambda x, y: (x * y).sum(0), normal(8, 33), normal(8, 33)),
    "outer product": (jnp.outer, normal(17), normal(33)),
    "matrix of one row": (lambda x, y: x.T @ y, normal(1, 17), normal(1, 33)),
    "matrix": (lambda x, y: x.T @ y, normal(64, 128), normal(64, 96)),
    "vector": (lambda x, y: x.T @ y, normal(40, 33), normal(40)),
    "scalar": (jnp.vdot, normal(40), normal(40)),
    "embedding": (scattered, normal(64, 1), normal(64, 33)),
    "stacked layers": (stacked, normal(5, 33), normal(5, 33)),
    "reused in a loop": (summed, normal(5, 33), normal(5, 33)),
    "slice": (lambda x, y: jnp.pad(x * y, ((1, 1), (0, 0))), normal(5, 33), normal(5, 33)),
    "bfloat16 products of a float32 matrix": (
        lambda x, y: (x.T @ y).astype(jnp.float32),
        normal(64, 128, dtype=jnp.bfloat16),
        normal(64, 96, dtype=jnp.bfloat16),
    ),
    "bfloat16": (jnp.multiply, normal(64, 33, dtype=jnp.bfloat16), normal(64, 33, dtype=jnp.bfloat16)),
    "bfloat16 matrix": (
        lambda x, y: x.T @ y,
        normal(64, 128, dtype=jnp.bfloat16),
        normal(64, 96, dtype=jnp.bfloat16),
    ),
    "float16": (jnp.multiply, normal(64, 33, dtype=jnp.float16), normal(64, 33, dtype=jnp.float16)),
    "complex": (lambda x, y: (x + 1j * y) * (y - 1j * x), normal(64, 33), normal(64, 33)),
}


def gives_equal_bits(name):
    """Added in one program; parked, then added; computed by a program of its own, then added."""
    gradient, *arguments = GRADIENTS[name]
    stored = np.asarray(jax.jit(gradient)(*arguments))
    wide = np.complex64 if np.iscomplexobj(stored) else np.float32
    totals = jnp.asarray(normal(*stored.shape)) * (1 + 1j if wide is np.complex64 else 1)
    program = jax.jit(adding(lambda *given: [gradient(*given)], 1), donate_argnums=0)
    expected = np.asarray(totals) + stored.astype(wide)
    parked = np.asarray(program(jnp.zeros(stored.shape, wide), *arguments)[0])
    found = np.asarray(program(totals + 0, *arguments)[0])
    return found.tobytes() == expected.tobytes() == (np.asarray(totals) + parked).tobytes()


@pytest.mark.parametrize("name", GRADIENTS)
def test_bits_are_those_of_an_addition_afterwards(name):
    assert gives_equal_bits(name)


BROKEN = {
    "nothing in between": lambda total, gradient: total + gradient.astype(total.dtype),
    "a barrier": lambda total, gradient: total + jax.lax.optimization_barrier(gradient).astype(total.dtype),
    "no barrier before widening": lambda total, gradient: added(total, gradient.astype(total.dtype)),
}


@pytest.mark.parametrize("form", BROKEN)
def test_simpler_forms_are_caught(form, monkeypatch):
    if form == "a barrier" and jax.__version_info__ >= (0, 12):
        pytest.skip("jax 0.12.0.1 gave equal bits with a barrier alone")
    monkeypatch.setattr("rrfp_jax.runtime.programs.gradients.added", BROKEN[form])
    assert not all(map(gives_equal_bits, GRADIENTS))


def test_a_negative_zero_counts_as_zero():
    """Sums begin at +0, so none is ever -0, and parked gradients need no sign of their zeros."""
    zero = jnp.zeros(3, np.float32)
    assert not np.signbit(added(zero, -zero)).any()
    assert np.isnan(added(zero, zero * jnp.nan)).all()
    assert np.isinf(added(zero, zero + jnp.inf)).all()
