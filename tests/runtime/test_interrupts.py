"""Ctrl-C at bad moments: nothing is left behind, and training goes on as if it had not come."""

import gc
import os
import random
import signal
import threading
import time

import chex
import jax
import pytest

from rrfp_jax.runtime.engine import engine
from rrfp_jax.runtime.engine.device import DeviceQueue
from tests.support import toy


@pytest.fixture(scope="module")
def trainers():
    return toy.trainer(3, clip_norm=1.0, stall_seconds=20), toy.trainer(3, clip_norm=1.0)


def press_control_c():
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_after(monkeypatch, owner, name):
    """Ctrl-C right after the first call of `owner.name`."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        monkeypatch.setattr(owner, name, original)
        result = original(*args, **kwargs)
        press_control_c()
        return result

    monkeypatch.setattr(owner, name, call)


def check_goes_on(trainer, undisturbed):
    """The next step is that of a run that was never interrupted, to the bit; what lives on is a Trainer's."""
    trainer._stepper.loader.settle()  # it loads the step that would have come next
    kept = {queue._thread for queue in gc.get_objects() if type(queue) is DeviceQueue}
    names = {thread.name for thread in set(threading.enumerate()) - kept}
    left = {name for name in names if name.startswith("rrfp")}
    assert left <= {"rrfp-overtime", "rrfp-load"}  # to the end of the process, and of the Trainer
    list(trainer.steps(1))
    list(undisturbed.steps(trainer.steps_done - undisturbed.steps_done))
    chex.assert_trees_all_equal(*(jax.device_get(t.stage_params) for t in (trainer, undisturbed)))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda trainer: (threading.Thread, "start"), id="a-thread-starts"),
        pytest.param(lambda trainer: (trainer._engine.stages[2], "put_sums"), id="sums-are-given-back"),
        pytest.param(lambda trainer: (engine, "on_host"), id="the-losses-are-fetched"),
        pytest.param(lambda trainer: (trainer._engine.optimizers[1], "update"), id="some-stages-are-updated"),
    ],
)
def test_at_the_worst_moment(trainers, monkeypatch, place):
    trainer, undisturbed = trainers
    list(trainer.steps(1))
    owner, name = place(trainer)
    interrupt_after(monkeypatch, owner, name)
    with pytest.raises(KeyboardInterrupt):
        list(trainer.steps(5))
    assert trainer._stepper.is_data_of_last_step(trainer._data)  # as a checkpoint would say
    check_goes_on(trainer, undisturbed)


def test_a_restore_is_whole(tmp_path, monkeypatch):
    saved, trainer = toy.trainer(3), toy.trainer(3)
    list(saved.steps(2))
    saved.save(tmp_path)
    saved._stepper.saves.finish()
    trainer.start()
    interrupt_after(monkeypatch, trainer._engine.stages[0], "replace")
    with pytest.raises(KeyboardInterrupt):
        trainer.restore(tmp_path)
    assert trainer.steps_done == 2
    chex.assert_trees_all_equal(*(jax.device_get(t.stage_params) for t in (trainer, saved)))


@pytest.fixture
def no_collection():
    """Python swallows a Ctrl-C that comes in a callback of its garbage collector, such as Hypothesis has."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow(reason="an interrupt at every moment; test_at_the_worst_moment has one")
@pytest.mark.usefixtures("no_collection")
def test_at_any_moment(trainers):
    trainer, undisturbed = trainers
    chance = random.Random(0)
    for _ in range(100):
        press = threading.Thread(target=lambda: (time.sleep(chance.uniform(0, 0.04)), press_control_c()))
        with pytest.raises(KeyboardInterrupt):
            press.start()
            list(trainer.steps(1000))
        press.join()
        check_goes_on(trainer, undisturbed)
