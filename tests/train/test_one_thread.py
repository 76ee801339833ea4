"""A Trainer in the hands of several threads, or of somebody who copies it: refused, and it stays whole."""

import copy
import pickle
import threading

import chex
import jax
import pytest

import rrfp_jax as rrfp
from tests.support import toy

CALLS = {
    "step": lambda trainer: trainer.step(toy.microbatches(3)),
    "value_and_grad": lambda trainer: trainer.value_and_grad(toy.microbatches(3)),
    "evaluate": lambda trainer: trainer.evaluate(lambda step: toy.microbatches(3)),
    "steps": lambda trainer: next(trainer.steps(1)),
    "save": lambda trainer: trainer.save("nowhere"),
    "restore": lambda trainer: trainer.restore("nowhere"),
    "params": lambda trainer: trainer.params(),
    "split": lambda trainer: setattr(trainer, "split", [4, 4]),
    "schedule": lambda trainer: setattr(trainer, "schedule", "1f1b"),
}


def in_thread(act, name):
    """What it returned or raised there."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60.0)
    return found[0]


@pytest.mark.parametrize("method", CALLS)
def test_a_second_thread_is_refused_by_name_and_the_trainer_stays_whole(trainer, method):
    undisturbed = toy.trainer(2, data=trainer._data)
    list(undisturbed.steps(trainer.steps_done))
    refused = []
    trainer._on_step = lambda report: refused.append(in_thread(lambda: CALLS[method](trainer), "the second"))
    in_thread(lambda: list(trainer.steps(2)), "the first")
    trainer._on_step = None
    for error in refused:
        assert isinstance(error, rrfp.UsageError)
        name = "step" if method == "steps" else method
        assert f"Trainer.{name} in thread 'the second' while Trainer.step in thread 'the first'" in str(error)
    list(undisturbed.steps(2))
    assert len(refused) == 2
    chex.assert_trees_all_equal(*(jax.device_get(t.stage_params) for t in (trainer, undisturbed)))


def test_the_same_thread_may_come_again(trainer):
    found = []
    trainer._on_step = lambda report: found.append(trainer.evaluate(lambda step: toy.microbatches(3)))
    list(trainer.steps(1))
    trainer._on_step = None
    assert len(found) == 1


COPIES = [copy.copy, copy.deepcopy, pickle.dumps, lambda trainer: copy.deepcopy({"kept": [trainer]})]


@pytest.mark.parametrize("copied", COPIES)
def test_copies_are_refused(trainer, copied):
    with pytest.raises(rrfp.UsageError, match="a Trainer cannot be copied or pickled, as its arrays"):
        copied(trainer)
