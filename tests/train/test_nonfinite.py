"""Steps that are not finite, and loss scaling, which makes them and needs them left out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.loss_scale import LossScale
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.gradients import SumPrograms
from rrfp_jax.runtime.programs.segments import placed_params
from rrfp_jax.train.stepping import MOST_IN_VAIN
from tests.support import toy
from tests.support.refusals import copied, refused, same

GOOD = toy.microbatches(3)
BAD = [GOOD[0], {**GOOD[1], "mask": np.where(GOOD[1]["mask"] > 0, np.nan, 0.0).astype(np.float32)}, GOOD[2]]
LAYERS, ROWS = 4, 2
SMALL, LARGE = 2.0**-30, 2.0**-4  # of the half-precision model's loss: gradients vanish, or scaled overflow


def weighted(i, params, carry, mb):
    """Adds one weighted field in float16; numbers have so few bits that every sum is exact."""
    x = mb["x"][:, i].astype(jnp.float16) * params["w"].astype(jnp.float16)
    return x if carry is None else carry + x


def half_precision(unit):
    layers = [
        rrfp.layer(partial(weighted, i), init=lambda key, i=i: {"w": jnp.float32(1 + i / 2)})
        for i in range(LAYERS)
    ]

    def loss(carry, mb):
        return rrfp.Loss(unit * 0.5 * (carry.astype(jnp.float32) ** 2).sum(), weight=carry.shape[0])

    return rrfp.Pipeline(layers, loss)


def half_batch():
    random = np.random.default_rng(0)
    return [{"x": random.integers(-1, 2, (ROWS, LAYERS)).astype(np.float32)} for _ in range(2)]


def trains_as_float32(mesh, unit, loss_scale, steps=3):
    """Whether weights and norms are those of training in float32 without a pipeline, and the reports."""
    optimizer, batch = optax.sgd(0.5 / unit), half_batch()
    trainer = toy.trainer(
        pipe=half_precision(unit), optimizer=optimizer, mesh=mesh, data=batch, loss_scale=loss_scale
    )
    params = {str(i): {"w": np.float32(1 + i / 2)} for i in range(LAYERS)}
    whole = np.concatenate([mb["x"] for mb in batch])

    @jax.jit
    @jax.grad
    def slope(params):
        y = sum(whole[:, i] * params[str(i)]["w"] for i in range(LAYERS))
        return unit * 0.5 * (y**2).mean()

    good, state, reports = True, optimizer.init(params), []
    while sum(report.applied for report in reports) < steps:
        reports.append(report := next(trainer.steps(1)))
        if report.applied:
            gradient = slope(params)
            good &= abs(report.gradient_norm / float(optax.tree.norm(gradient)) - 1) <= 1e-5
            changes, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, changes)
    pairs = zip(jax.tree.leaves(trainer.stage_params), jax.tree.leaves(params), strict=True)
    return good and all(abs(float(a) - float(b)) <= 1e-5 * abs(float(b)) for a, b in pairs), reports


class TestHalfPrecision:
    @pytest.mark.parametrize(
        "mesh", [rrfp.Mesh(pp=1), rrfp.Mesh(pp=4), rrfp.Mesh(pp=2, chunks=2)], ids=["1", "4", "2x2"]
    )
    def test_gradients_that_would_vanish_do_not_if_the_loss_is_scaled(self, mesh):
        assert trains_as_float32(mesh, SMALL, 2.0**20)[0]

    def test_they_do_vanish_without(self):
        assert not trains_as_float32(rrfp.Mesh(pp=4), SMALL, None)[0]

    def test_a_scale_under_which_they_overflow_is_halved_until_they_do_not(self):
        good, reports = trains_as_float32(rrfp.Mesh(pp=4), LARGE, LossScale(value=2.0**22))
        assert good
        skipped = [report for report in reports if not report.applied]
        assert reports[: len(skipped)] == skipped and len(skipped) == reports[-1].skipped > 2
        assert [r.loss_scale for r in reports[: len(skipped)]] == [
            2.0 ** (22 - k) for k in range(len(skipped))
        ]
        assert reports[-1].loss_scale == 2.0 ** (22 - len(skipped))


class TestLossScale:
    def test_it_doubles_after_good_steps_and_halves_after_a_bad_one(self):
        scale, seen = LossScale(value=4.0, growth_interval=2, smallest=2.0, largest=8.0), []
        for finite in (True, True, True, False, True, True, False, False, False):
            seen.append(scale.value)
            scale = scale.after(finite)
        assert seen == [4, 4, 8, 8, 4, 4, 8, 4, 2] and scale.value == 2

    def test_a_constant_one_stays(self):
        trainer = toy.trainer(2, loss_scale=8)
        assert trainer._stepper.standing.after(finite=False).loss_scale == trainer.loss_scale
        assert trainer.loss_scale.value == 8

    @pytest.mark.slow(reason="2 s: a Trainer of its own")
    def test_no_other_scale_compiles_anything(self, monkeypatch):
        trainer = toy.trainer(4, loss_scale="dynamic")
        assert trainer.step(GOOD).loss_scale == 2.0**15
        monkeypatch.setattr(Compiler, "__call__", lambda *args, **kwargs: pytest.fail("compiled"))
        assert not trainer.step(BAD).applied
        report = trainer.step(GOOD)
        assert report.loss_scale == 2.0**14 and report.applied

    @pytest.mark.parametrize("given", [0.0, -1, float("inf"), float("nan"), "big", [1]], ids=str)
    def test_what_is_no_scale(self, given):
        with refused("loss_scale=", str(given), "give ", "a number ", "'dynamic'"):
            toy.trainer(2, loss_scale=given)


class TestSkipping:
    def test_a_skipped_step_changes_nothing_is_counted_and_said(self):
        trainer, other = (toy.trainer(2, data=None, on_nonfinite="skip") for _ in range(2))
        for batch in (GOOD, BAD, BAD, GOOD):
            before = copied(trainer) if trainer.steps_done else None
            report = trainer.step(batch)
            assert report.applied == (batch is GOOD)
            if not report.applied:
                assert same(trainer, before)
                assert report.as_dict()["loss"] is None and report.as_dict()["gradient_norm"] is None
                assert f"skipped ({report.skipped} so far)" in str(report)
        assert (report.step, report.skipped, trainer.steps_done) == (3, 2, 4)
        assert "skipped" not in str(report)
        other.step(GOOD)
        other.step(GOOD)
        assert same(other, copied(trainer))

    @pytest.mark.slow(reason="2 s: a Trainer of its own")
    def test_many_in_a_row_stop_the_run(self):
        trainer = toy.trainer(4, data=None, on_nonfinite="skip")
        for _ in range(2):
            for _ in range(MOST_IN_VAIN - 1):
                trainer.step(BAD)
            trainer.step(GOOD)  # begins a new row
        for _ in range(MOST_IN_VAIN - 1):
            trainer.step(BAD)
        with refused("microbatch 1 is nan", f"{MOST_IN_VAIN}th step in a row", error=rrfp.TrainingError):
            trainer.step(BAD)

    @pytest.mark.slow(reason="2 s; TestHalfPrecision has scales that are lowered")
    def test_a_scale_that_cannot_be_lowered_does_not_hide_a_bad_step(self):
        trainer = toy.trainer(4, data=None, loss_scale=LossScale(value=2.0, smallest=1.0))
        assert not trainer.step(BAD).applied
        with refused("step 1", "microbatch 1 is nan", error=rrfp.TrainingError):
            trainer.step(BAD)
        assert trainer.steps_done == 1


def norms(sums):
    specs = {"0": {"w": jax.ShapeDtypeStruct(np.shape(sums), jnp.float32)}}
    roles = [Roles.of(specs).leaves(specs)]
    stage_mesh = StageMesh((jax.devices()[0],))
    compiled = SumPrograms.compile(
        [placed_params(specs, stage_mesh, Sharding())], roles, Compiler(stage_mesh)
    )
    leaves = [jnp.asarray(sums, jnp.float32)]
    return compiled.norms(leaves, leaves).tolist()


def test_squares_that_overflow_are_no_gradient_that_is_not_finite():
    largest, share, _ = norms([3e30, -4e30])
    assert largest**2 * share == pytest.approx(25e60)
    assert norms([0.0, 0.0])[:2] == [0, 0]
    assert not np.isfinite(norms([1.0, np.nan, 2.0])[0]) and not np.isfinite(norms([1.0, -np.inf])[0])
