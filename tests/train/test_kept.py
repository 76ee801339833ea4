"""What modules keep besides parameters: random streams, tables and statistics; also evaluated and saved."""

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from tests.support.toy import made

WIDTH = 4
BATCH = [{"x": x} for x in np.random.default_rng(0).standard_normal((4, 2, WIDTH)).astype(np.float32)]


class Keeps(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)
        self.table = np.linspace(0, 1, WIDTH)
        self.shift = jnp.arange(WIDTH) + jax.random.uniform(rngs.params(), WIDTH)

    @nnx.remat
    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)) * self.table + self.shift)


class LinenKeeps(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.WeightNorm(linen.Dense(WIDTH))(x)
        x = linen.BatchNorm(use_running_average=True)(x)
        if train:
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        shift = self.variable(
            "constants", "shift", lambda: jax.random.uniform(self.make_rng("params"), (WIDTH,))
        )
        return linen.Dropout(0.5, deterministic=not train)(x * shift.value)


def make(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)), "order": jnp.arange(WIDTH)[::-1], "name": "tree"}


def use(tree, x, mb):
    return (x @ tree["w"])[:, tree["order"]]


def pipeline():
    layers = [
        rrfp.layer(lambda carry, mb: mb["x"]),
        rrfp.layer(Keeps, call=lambda module, x, mb: module(x), repeat=2),
        rrfp.layer(LinenKeeps, call=lambda module, x, mb: module(x, mb.training)),
        rrfp.layer(make=make, call=use),
    ]
    return rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=len(x)))


def trainer_of(**settings):
    return made(pipeline(), optax.adam(0.1), data=BATCH, mesh=rrfp.Mesh(pp=2), **settings)


@pytest.fixture(scope="module")
def trainer():
    own = trainer_of()
    own.start()
    return own


def test_only_parameters_are_trained_and_the_optimizer_knows_no_others(trainer):
    before = jax.device_get(trainer.stage_params)
    trainer.step(BATCH)
    after = jax.device_get(trainer.stage_params)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert changed["1"] == {
        "linear": {"bias": True, "kernel": True},
        "norm": {"bias": True, "scale": True, "mean": False, "var": False},
        "shift": False,
        "table": False,
    }
    assert changed["3"] == {
        "@batch_stats": {"BatchNorm_0": {"mean": False, "var": False}},
        "@constants": {"shift": False},
        "BatchNorm_0": {"bias": True, "scale": True},
        "Dense_0": {"bias": True, "kernel": True},
        "WeightNorm_0": {"Dense_0/kernel/scale": True},
    }
    assert changed["4"] == {"order": False, "w": True}


@pytest.mark.slow(reason="4 s; runtime/test_random_keys.py has the keys")
def test_random_numbers_are_those_of_the_microbatch_whatever_the_order(trainer):
    found = []
    for schedule in ("bf", "gpipe", "fb", "bf"):
        trainer.schedule = schedule
        found.append(trainer.value_and_grad(BATCH))
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        chex.assert_trees_all_equal(gradient, found[0][1])
    same = trainer.value_and_grad([BATCH[0]] * 4)[0]
    assert same != trainer.value_and_grad([BATCH[0]])[0]  # each microbatch draws its own
    assert trainer.check().ok


def test_evaluation_is_that_of_the_authors_modules(trainer):
    first, second, third, last = trainer.params(modules=True)[1:]
    assert isinstance(first, Keeps) and last["name"] == "tree"
    plain = Keeps(nnx.Rngs(5))
    nnx.update(plain, trainer.params()[1])
    plain.eval()
    variables = trainer.params()[3]
    assert sorted(variables) == ["batch_stats", "constants", "params"]

    def loss(fields):
        x = plain(fields["x"])
        chex.assert_trees_all_equal(x, first(fields["x"]))
        x = LinenKeeps().apply(variables, second(x), False)
        chex.assert_trees_all_equal(x, third(second(first(fields["x"])), False))
        return float((use(last, x, None) ** 2).sum() / len(x))

    expected = np.mean([loss(jax.tree.map(jnp.asarray, fields)) for fields in BATCH])
    assert trainer.evaluate(BATCH).loss == pytest.approx(expected, rel=2e-6)
    assert trainer.evaluate(BATCH).loss == trainer.evaluate(BATCH).loss


@pytest.mark.slow(reason="3 s: a Trainer of its own; test_put_in.py exports such layers")
def test_checkpoints_and_exports_have_all_of_it(trainer, tmp_path):
    trainer.save(tmp_path)
    assert any("Dense_0%2Fkernel%2Fscale" in path.name for path in tmp_path.rglob("params.3.*"))
    other = trainer_of(seed=7)
    other.restore(tmp_path, params_only=True)
    chex.assert_trees_all_equal(*(jax.device_get(own.stage_params) for own in (trainer, other)))
    assert other.evaluate(BATCH).loss == trainer.evaluate(BATCH).loss
    for pipe in (None, pipeline()):
        exported = rrfp.export(tmp_path, pipe=pipe)
        for own, expected in zip(exported, trainer.params(), strict=True):
            chex.assert_trees_all_equal(own, expected)
    *_, third, _ = rrfp.export(tmp_path, pipe=pipeline(), modules=True)
    chex.assert_trees_all_equal(third.variables, trainer.params()[3])
