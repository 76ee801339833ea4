"""What breaks in a step is survived: parameters unchanged, nothing left behind, training goes on."""

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.transport.protocol import LocalTransport
from tests.support import toy
from tests.support.refusals import BATCH, copied, refused, same


def spoilt(value, j):
    mask = BATCH[j]["mask"].copy()
    mask[0, 0] = value
    return [*BATCH[:j], {**BATCH[j], "mask": mask}, *BATCH[j + 1 :]]


class TestLossesThatAreNotFinite:
    @pytest.mark.parametrize(("value", "name"), [(np.nan, "nan"), (np.inf, "inf")])
    def test_step_and_microbatch_are_named_and_training_goes_on(self, trainer, value, name):
        before, step = copied(trainer), trainer.steps_done
        for method in (trainer.value_and_grad, trainer.step):
            with refused(f"step {step}", f"microbatch 1 is {name}", "not applied", error=rrfp.TrainingError):
                method(spoilt(value, 1))
        assert same(trainer, before) and trainer.steps_done == step
        assert trains_as_if_nothing_had_happened(trainer)
        assert np.isfinite(trainer.step(BATCH).loss)

    def test_evaluation_names_them_too(self, trainer):
        with refused("step 1", "microbatch 2 is nan", error=rrfp.TrainingError):
            trainer.evaluate(lambda step: spoilt(np.nan, 2) if step else BATCH, steps=2)

    def test_no_weight(self, trainer):
        before = copied(trainer)
        batch = [{**mb, "mask": 0 * mb["mask"]} for mb in BATCH]
        with refused("loss weight is 0", "masked", "weight=", error=rrfp.TrainingError):
            trainer.step(batch)
        assert same(trainer, before)

    def test_a_gradient_norm_that_is_not_finite_is_not_applied(self):
        def root(params, carry, mb):  # 0 at w = 1, with an infinite slope
            return jnp.sqrt((params["w"] - 1) * mb["x"])

        def loss(carry, mb):
            return rrfp.Loss(carry.sum(), weight=carry.shape[0])

        pipe = rrfp.Pipeline([rrfp.layer(root, init=lambda key: {"w": jnp.ones(())})], loss)
        batch = [{"x": np.ones(2, np.float32)}]
        trainer = toy.trainer(1, pipe=pipe, optimizer=optax.sgd(0.1), clip_norm=1.0, data=batch)
        with refused("step 0", "the gradient of 0.w on stage 0", "not applied", error=rrfp.TrainingError):
            trainer.step(batch)
        assert float(trainer.stage_params["0"]["w"]) == 1


class Losing(LocalTransport):
    """Delivers everything but what belongs to microbatch 2."""

    def offer(self, key, arrays):
        if key.input.microbatch != 2:
            super().offer(key, arrays)


def watchers(trainer):
    return {queue._thread for queue in trainer._engine.driver._queues}


def threads_but(trainer):
    """All but those that live as long as it does; a step that is broken off ends them."""
    return set(threading.enumerate()) - watchers(trainer)


def trains_as_if_nothing_had_happened(trainer):
    batch = toy.microbatches(3, seed=1)
    _, expected = toy.reference(trainer.stage_params, batch)
    return toy.worst_leaf(trainer.value_and_grad(batch)[1], expected) <= 1e-5


class TestStepsThatAreBrokenOff:
    @pytest.mark.parametrize("schedule", ["bf", "1f1b"])
    def test_a_stall_names_what_was_awaited(self, trainer, schedule, monkeypatch):
        driver, threads, before = trainer._engine.driver, threads_but(trainer), copied(trainer)
        step = trainer.steps_done
        monkeypatch.setattr(trainer, "schedule", rrfp.schedules.by_name(schedule))
        with monkeypatch.context() as lossy:
            lossy.setattr(driver, "local", Losing(driver.devices))
            lossy.setattr(driver, "_stall_seconds", 1.0)
            said = [f"step {step}", "nothing moved", "stage 1 waits for", "F2"]
            with refused(*said, error=rrfp.TrainingError):
                trainer.step(BATCH)
        assert threads_but(trainer) == threads and watchers(trainer) == {None} and same(trainer, before)
        assert trains_as_if_nothing_had_happened(trainer)
        assert trainer.step(BATCH).step == step

    def test_an_interrupt_leaves_nothing_behind(self, trainer, monkeypatch):
        produced, threads, before = LocalTransport.produced, threads_but(trainer), copied(trainer)

        def interrupted(self, key, at):
            produced(self, key, at)
            if key.input.microbatch == 1:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LocalTransport, "produced", interrupted)
            trainer.step(BATCH)
        assert threads_but(trainer) == threads and watchers(trainer) == {None} and same(trainer, before)
        assert trains_as_if_nothing_had_happened(trainer)
