"""What runs once a step is compiled for few layers, and called for as many as there are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.gradients import LAYERS, NormPrograms
from rrfp_jax.runtime.stages.optimizer import Hyperparams, OptimizerPrograms, WholeOptimizer

SHAPES = [(64, 33), (33,), (), (100, 7)]


def values(layers, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return [[jnp.asarray(random.standard_normal(s), dtype) for s in SHAPES] for _ in range(layers)]


@pytest.fixture
def compiler():
    return Compiler(StageMesh((jax.devices()[0],)), Executables())


def specs_of(tree, compiler):
    where = compiler.stage_mesh.whole
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)


def flat(layers):
    return [leaf for own in layers for leaf in own]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_no_bit_of_a_norm_depends_on_where_layers_are_cut(compiler, dtype):
    params, sums = values(2 * LAYERS + 1, dtype), values(2 * LAYERS + 1, seed=1)
    specs = specs_of(params, compiler)
    cut, whole = NormPrograms.compile(specs, compiler), NormPrograms.compile([flat(specs)], compiler)
    assert len(cut.squares.programs) == 3 and len(cut.programs) == 4 and len(whole.squares.programs) == 1
    found = [np.asarray(one(flat(params), flat(sums))) for one in (cut, whole)]
    assert np.array_equal(*found)
    expected = sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in flat(sums))
    assert float(found[0][0]) ** 2 * float(found[0][1]) == pytest.approx(expected)


def updated(optimizer, layers, compiler):
    """How many programs and pieces update so many equal layers, as optax itself does."""
    params = {str(i): own for i, own in enumerate(values(layers))}
    specs = specs_of(params, compiler)
    sums = {str(i): own for i, own in enumerate(values(layers, seed=1))}
    whole = WholeOptimizer.trace(optimizer, specs)
    part = whole.part(range(layers), "stage 0")
    roles = [Roles.of(specs, (), (), ()).leaves(specs)]
    programs = OptimizerPrograms.compile([specs], roles, whole, part, compiler, False)
    state, expected = optimizer.init(params), params
    gradients, own = jax.tree.map(lambda a: 0.5 * a, sums), jax.tree.map(jnp.copy, params)
    leaves = jax.tree.leaves(own)
    kept = programs.begin(leaves)
    for _ in range(3):
        changes, state = optimizer.update(gradients, state, expected)
        expected = optax.apply_updates(expected, changes)
        leaves, kept, zeroed = programs.update(leaves, kept, jax.tree.leaves(sums), jnp.float32(0.5))
        assert all(not leaf.any() for leaf in zeroed)
        sums = {str(i): one for i, one in enumerate(values(layers, seed=1))}
    for one, other in ((leaves, expected), (kept, state)):
        for a, b in zip(one, jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return len(programs.updates), len(programs.pieces)


PRINTING = optax.chain(optax.stateless(lambda u, p: (jax.debug.print("update"), u)[1]), optax.adam(0.1))

CASES = {  # programs and pieces for 1, and for 8 layers
    "adamw": (optax.adamw(1e-2), (2, 2), (2, 3)),
    "sgd": (optax.sgd(1e-2), (1, 1), (1, 2)),
    "what looks at all of them": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        (2, 2),
        (2, 2),
    ),
    "a print": (PRINTING, (1, 1), (1, 1)),
    "a schedule": (
        optax.chain(optax.scale_by_schedule(lambda n: 0.1 / (n + 1)), optax.adam(0.1)),
        (2, 2),
        (2, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_updated_by_one_program_unless_they_need_each_other(case, compiler, capfd):
    optimizer, one, eight = CASES[case]
    assert updated(optimizer, 1, compiler) == one
    capfd.readouterr()
    assert updated(optimizer, 2 * LAYERS, compiler) == eight
    jax.effects_barrier()
    if case == "a print":
        assert capfd.readouterr().out.count("update") == 6  # three by optax itself


def test_what_an_optimizer_prints_is_of_one_stage_and_leaves_its_hyperparameters_alone(compiler):
    norm = optax.stateless(lambda u, p: (jax.debug.print("{}", optax.tree.norm(u)), u)[1])
    specs = specs_of({str(i): own for i, own in enumerate(values(2))}, compiler)
    whole = WholeOptimizer.trace(optax.chain(norm, optax.inject_hyperparams(optax.sgd)(0.1)), specs)
    with pytest.raises(UsageError, match=r"what it prints depends on .* 1\.0, .* report\.gradient_norm"):
        whole.part([0], "stage 0")
    state = specs_of([spec for _, spec in whole.state], compiler)
    found = Hyperparams.compile(whole, whole.part(range(2), "stage 0"), state, compiler)
    assert found.names == ["learning_rate"]


def adding(init, added):
    """An optimizer with a state that follows from no parameter."""
    return optax.GradientTransformation(init, lambda updates, state, _: (added(updates, state), state))


ONE = adding(lambda _: jnp.zeros(()), lambda updates, one: jax.tree.map(lambda u: u + one, updates))
EACH = adding(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda u, own: jax.tree.map(jnp.add, u, own)
)


@pytest.mark.parametrize(
    ("optimizer", "layer", "owners"),
    [
        (optax.adam(0.1), {"count": jnp.ones(())}, [set(), {0}, {1}, {0}, {1}]),
        (optax.chain(ONE, optax.sgd(0.1)), jnp.ones(()), [set()]),
        (optax.chain(EACH, optax.sgd(0.1)), jnp.ones(()), [{0}, {1}]),
    ],
)
def test_what_all_updates_read_is_of_no_parameter_though_it_is_named_like_one(optimizer, layer, owners):
    assert WholeOptimizer.trace(optimizer, {"0": layer, "1": layer}).owners == owners
