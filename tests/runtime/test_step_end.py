"""From one step to the next: tasks are queued behind the update, norms behind the last gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.engine.device import DeviceQueue
from rrfp_jax.runtime.engine.loop import StepExecution
from rrfp_jax.runtime.stages.step import ModelStep
from tests.support import toy

STAGES, MICROBATCHES, STEPS = 2, 4, 6


def changed(change):
    """SGD of gradients that are changed first."""

    def update(gradients, state, params=None):
        return jax.tree.map(change, gradients), state

    return optax.chain(
        optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1)
    )


def slowly(gradient):
    """The same, some milliseconds later."""
    square = jnp.full((128, 128), gradient.ravel()[0])
    late = jax.lax.fori_loop(0, 10, lambda _, x: jnp.tanh(x @ x), square)
    return gradient + 0 * late[0, 0]


def trained(change, schedule="bf"):
    trainer = toy.trainer(STAGES, schedule=schedule, optimizer=changed(change))
    reports = [trainer.step(toy.microbatches(MICROBATCHES, seed=step)) for step in range(STEPS)]
    return reports, jax.device_get(trainer.stage_params)


@pytest.mark.parametrize("schedule", ["bf", "1f1b", "bfw"])
def test_tasks_run_behind_the_update(schedule, monkeypatch):
    plain, expected = trained(lambda gradient: gradient, schedule)
    behind, ends = [], []
    dispatch, ended = StepExecution._dispatch, DeviceQueue.ended

    def dispatched(self, queue, stage, choice, now):
        if queue.is_updating:
            behind.append((self._step, stage, choice.task))
        dispatch(self, queue, stage, choice, now)

    def noted(self):
        found = ended(self)
        ends.extend((running.step, running.end) for running in found if running.is_update)
        return found

    monkeypatch.setattr(StepExecution, "_dispatch", dispatched)
    monkeypatch.setattr(DeviceQueue, "ended", noted)
    reports, params = trained(slowly, schedule)
    assert behind, "no task was queued behind an update"
    assert [report.loss for report in reports] == [report.loss for report in plain]
    assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))
    for step, stage, task in behind:
        trace = reports[step].trace
        (record,) = (r for r in trace.stage_records(stage) if r.task == task)
        assert max(record.ready, record.dispatched) <= record.start
        assert trace.start >= min(end for of, end in ends if of == step), "an update is not part of a step"


class FailingToken:
    def is_ready(self):
        return True

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("no more")


def test_an_update_that_fails_is_named(monkeypatch):
    submit = DeviceQueue.submit

    def submitted(self, running):
        if running.is_update:
            running.token = FailingToken()
        submit(self, running)

    monkeypatch.setattr(DeviceQueue, "submit", submitted)
    with pytest.raises(rrfp.TrainingError, match="the last update failed: no more"):
        trained(slowly)


@pytest.mark.slow(reason="a Trainer of its own")
def test_norms_are_dispatched_behind_the_last_gradients(monkeypatch):
    """By the time all tasks have ended they are under way on every stage, whatever transfers are barred."""
    finish, finished = ModelStep.finish, []

    def noted(self):
        finish(self)
        guard = jax.config.jax_transfer_guard_device_to_host
        finished.append((self.stage.index, self.norms is not None, guard))

    monkeypatch.setattr(ModelStep, "finish", noted)
    with jax.transfer_guard("disallow"):
        trained(lambda gradient: gradient)
    assert sorted(finished) == [(stage, True, "allow") for stage in range(STAGES) for _ in range(STEPS)]
