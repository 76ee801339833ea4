"""Programs of a stage of several devices: how their values lie, and what one device has of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rrfp_jax.forecast.per_device import COLLECTIVE, per_device
from rrfp_jax.forecast.placed_programs import stage_of
from rrfp_jax.forecast.propagation import layouts
from rrfp_jax.runtime.autodiff.traced import inline, without_barriers

TP, ROWS, WIDTH, INSIDE = 4, 8, 16, 32

MESH = stage_of(TP)

WHOLE, SPREAD_ROWS, COLUMNS, OTHER_ROWS = P(), P("tp"), P(None, "tp"), P("tp", None)


def spec(shape, lies):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, lies))


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


def on_one(function, specs, out):
    """The primitives of what one device runs, with the shapes that they give."""
    flat = without_barriers(inline(jax.make_jaxpr(function)(*specs)))
    known = layouts(flat, specs, [NamedSharding(MESH, out)])
    program = per_device(flat, known).jaxpr
    return [(own.primitive.name, own.outvars[0].aval.shape) for own in program.eqns]


def weights():
    return spec((WIDTH, INSIDE), COLUMNS), spec((INSIDE, WIDTH), OTHER_ROWS)


def test_columns_then_rows_are_added_up_in_place():
    """As arXiv:1909.08053 has it: one sum, and each device has a part of what is inside."""
    hidden, result = (ROWS, INSIDE // TP), (ROWS, WIDTH)
    assert on_one(mlp, [spec(result, WHOLE), *weights()], WHOLE) == [
        *(("dot_general", hidden), ("tanh", hidden), ("dot_general", result)),
    ]


def test_rows_that_are_spread_are_gathered_before_and_spread_after():
    hidden, result, part = (ROWS, INSIDE // TP), (ROWS, WIDTH), (ROWS // TP, WIDTH)
    assert on_one(mlp, [spec(result, SPREAD_ROWS), *weights()], SPREAD_ROWS) == [
        *(("collective", result), ("dot_general", hidden), ("tanh", hidden)),
        *(("dot_general", result), ("collective", part)),
    ]


def test_every_kernel_gathers_for_itself():
    def two(x, up):
        return (x @ up) * (jnp.tanh(x) @ up)

    found = on_one(two, [spec((ROWS, WIDTH), SPREAD_ROWS), spec((WIDTH, INSIDE), COLUMNS)], COLUMNS)
    assert [name for name, _ in found].count(COLLECTIVE.name) == 2


@pytest.mark.parametrize(("lies", "collectives"), [(WHOLE, 0), (COLUMNS, 1), (SPREAD_ROWS, 0)])
def test_a_reduction_over_what_is_spread_is_added_up(lies, collectives):
    out = P("tp") if lies == SPREAD_ROWS else WHOLE
    found = on_one(lambda x: x.sum(1), [spec((ROWS, WIDTH), lies)], out)
    assert [name for name, _ in found].count(COLLECTIVE.name) == collectives


def test_zeros_that_a_gradient_is_scattered_to_are_made_in_parts():
    def gradient(rows, x):
        return jnp.zeros((INSIDE, WIDTH)).at[rows].add(x)

    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=NamedSharding(MESH, WHOLE))
    found = on_one(gradient, [rows, spec((ROWS, WIDTH), WHOLE)], OTHER_ROWS)
    assert {shape for name, shape in found if name == "scatter-add"} == {(INSIDE // TP, WIDTH)}
    assert (INSIDE, WIDTH) not in [shape for _, shape in found]
