"""Training that is stopped and goes on: in the same way, on other stages, by another schedule."""

import errno
import gc
import re
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.checkpoint import saving
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.loss_scale import LossScale, loss_scale_of
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages import stage
from rrfp_jax.train.resume import CheckpointWriter
from tests.support import toy
from tests.support.stored import whole

STEPS = 16

FITS = "of another optimizer: the parameters fit, the optimizer's state does not"


def trainer(stages=4, **kwargs):
    return toy.trainer(stages, **{"clip_norm": 0.5, "loss_scale": "dynamic", **kwargs})


def shorter():
    embed, _, head = toy.layers()
    return rrfp.Pipeline([embed, rrfp.layer(toy.block, init=toy.block_init, repeat=2), head], toy.loss)


def state(trainer):
    return jax.device_get([trainer.stage_params, *(own.state for own in trainer._engine.optimizers)])


def numbers(report):
    return report.step, report.loss, report.gradient_norm, report.loss_scale, report.plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints half-way and at the end of a run, its reports and its last state."""
    folder, own = tmp_path_factory.mktemp("checkpoints"), trainer()
    reports = list(own.steps(STEPS // 2))
    own.save(folder)
    halfway = jax.device_get(own.stage_params)
    reports += own.steps(STEPS - STEPS // 2)
    own.save(folder, wait=False)
    own.finish_saving()
    return folder, reports, halfway, state(own)


def test_it_goes_on_to_the_bit(saved):
    folder, reports, _, last = saved
    own = trainer()
    assert own.restore(folder, step=STEPS // 2)
    assert list(map(numbers, own.steps(STEPS - STEPS // 2))) == list(map(numbers, reports[STEPS // 2 :]))
    chex.assert_trees_all_equal(state(own), last)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [(rrfp.Mesh(pp=2), "bfw"), (rrfp.Mesh(pp=1), "1f1b"), (rrfp.Mesh(pp=2, chunks=2, shape="v"), "zb-v")],
)
def test_on_another_mesh_by_another_schedule(saved, mesh, schedule):
    folder, _, halfway, _ = saved
    own = trainer(mesh=mesh, schedule=schedule)
    own.restore(folder, step=STEPS // 2)
    chex.assert_trees_all_equal(own.stage_params, halfway)
    assert own.steps_done == STEPS // 2
    batch = toy.microbatches(8, seed=9)
    assert toy.worst_leaf(own.value_and_grad(batch)[1], toy.reference(halfway, batch)[1]) <= 1e-5


def small(width=4):
    """Two layers with a matrix and a vector each."""

    def init(key):
        return {"w": jax.random.normal(key, (width, width)), "b": jnp.zeros(width)}

    def dense(params, carry, mb):
        return (mb["x"] if carry is None else jnp.tanh(carry)) @ params["w"] + params["b"]

    def loss(carry, mb):
        return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])

    return rrfp.Pipeline([rrfp.layer(dense, init=init), rrfp.layer(dense, init=init)], loss)


OPTIMIZERS = {
    "amsgrad": lambda: optax.amsgrad(0.01),
    "lamb": lambda: optax.lamb(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "sm3": lambda: optax.sm3(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_whole_state_comes_back_on_another_number_of_stages(tmp_path, name):
    """Also that which is not shaped like the parameters."""
    batch = [{"x": np.arange(8, dtype=np.float32).reshape(2, 4) / (1 + j)} for j in range(2)]
    ends = []
    for stages in (2, 1):
        own = toy.trainer(stages, pipe=small(), optimizer=OPTIMIZERS[name](), data=batch)
        if stages == 2:
            list(own.steps(2))
            own.save(tmp_path)
        else:
            assert own.restore(tmp_path) and own.steps_done == 2
        list(own.steps(2))
        ends.append(jax.device_get(own.stage_params))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("before", "asked", "value", "said"),
    [
        (None, "dynamic", 2.0**15, "loss_scale is dynamic, as asked for; it was 1 when"),
        ("dynamic", 8, 8.0, "loss_scale is 8, as asked for; it was dynamic when"),
        (4, 4, 4.0, None),
        (LossScale(value=2.0, growth_interval=1), LossScale(largest=2.0**15), 4.0, None),
    ],
)
def test_another_loss_scale(tmp_path, capsys, before, asked, value, said):
    own = toy.trainer(1, loss_scale=before)
    own.step(toy.microbatches(2, seed=1))
    own.save(tmp_path)
    other = toy.trainer(1, loss_scale=asked)
    other.restore(tmp_path)
    assert other.loss_scale.value == value and other.loss_scale.dynamic == loss_scale_of(asked).dynamic
    told = capsys.readouterr().out
    assert said in told if said else "as asked for" not in told


def test_a_seed_of_numpys_is_kept(tmp_path):
    own = toy.trainer(1, seed=np.int64(3))
    own.step(toy.microbatches(2, seed=1))
    own.save(tmp_path)
    assert toy.trainer(1, seed=3).restore(tmp_path)


def test_what_is_being_saved_is_restored(tmp_path, monkeypatch):
    waits, write, finish = threading.Event(), saving.write_leaf, CheckpointWriter.finish

    def written(*leaf):
        waits.wait(20.0)
        return write(*leaf)

    def finished(self):
        waits.set()
        return finish(self)

    monkeypatch.setattr(saving, "write_leaf", written)
    own = toy.trainer(1)
    own.step(toy.microbatches(2, seed=1))
    own.save(tmp_path, wait=False)
    monkeypatch.setattr(CheckpointWriter, "finish", finished)
    assert own.restore(tmp_path) and own.steps_done == 1 and waits.is_set()


def test_a_checkpoint_is_of_one_step(saved):
    folder = saved[0] / str(STEPS)
    with pytest.raises(rrfp.UsageError, match=f"is the checkpoint of step {STEPS}, not of 3"):
        rrfp.export(folder, step=3)


def test_the_latest_is_taken(saved, capsys):
    own = trainer(1)
    assert own.restore(saved[0]) and own.steps_done == STEPS
    assert "other data" not in capsys.readouterr().out


def test_steps_taken_beside_the_writing_change_nothing_that_is_saved(tmp_path):
    own = trainer(2)
    list(own.steps(2))
    before = jax.device_get(own.stage_params)
    own.save(tmp_path, wait=False)
    list(own.steps(3))
    own.finish_saving()
    assert own.restore(tmp_path) and own.steps_done == 2
    chex.assert_trees_all_equal(jax.device_get(own.stage_params), before)


@pytest.mark.parametrize("params_only", [False, True])
def test_no_more_than_a_leaf_is_there_twice(saved, monkeypatch, params_only):
    folder, own = saved[0], trainer(1)
    own.start(toy.microbatches(2))
    gc.collect()

    def live():
        return sum(array.nbytes for array in jax.live_arrays())

    before, found, put = live(), [], stage.from_shards

    def seen(*args):
        found.append(live())
        return put(*args)

    monkeypatch.setattr(stage, "from_shards", seen)
    own.restore(folder, params_only=params_only)
    assert found and max(found) <= before + max(leaf.nbytes for leaf in jax.tree.leaves(own.stage_params))


def test_what_another_script_is_writing_stays_until_one_saves_there_itself(saved, tmp_path, capsys):
    folder, own = tmp_path / "checkpoints", trainer(1)
    shutil.copytree(saved[0], folder)
    writing = folder / ".99.saving"
    writing.mkdir()
    assert own.restore(folder) and writing.exists()
    own.save(folder)
    assert not writing.exists()
    assert f"the checkpoint {writing} was never completed: it is removed" in capsys.readouterr().out


def test_typed_keys_come_back_from_their_numbers():
    key = jax.random.split(jax.random.key(5), 3)
    arrays = [jax.random.split(jax.random.key(0), 3)]
    stage.replace_arrays(arrays, [whole(np.asarray(jax.random.key_data(key)))])
    chex.assert_trees_all_equal(*(jax.random.key_data(keys) for keys in (arrays[0], key)))


def test_nothing_there(tmp_path, capsys, monkeypatch):
    own = trainer(1)
    monkeypatch.setattr(own, "_resume", lambda folder, step: False)  # it would compile
    (tmp_path / ".2.saving").mkdir()  # was never completed
    for folder in (tmp_path, tmp_path / "thrid.checkpoints"):
        assert not own.restore(folder) and own.steps_done == 0
        assert capsys.readouterr().out == f"no checkpoint in {folder}: training begins with step 0\n"


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(saved, monkeypatch):
    """Nor by a named run, which says nothing where there is none."""
    own, stale = trainer(1), Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr(Path, "iterdir", stale)
    with pytest.raises(rrfp.UsageError, match=f"{saved[0]}: cannot be read: Stale file handle"):
        own._check_resume(saved[0])
    with pytest.raises(rrfp.UsageError, match="cannot be read"):
        Checkpoints(saved[0], World()).restore({})


@pytest.mark.parametrize("params_only", [False, True])
def test_a_step_that_is_not_there_is_refused_before_anything_is_compiled(saved, params_only):
    own = trainer(1)
    with pytest.raises(rrfp.UsageError, match=f"no checkpoint of step 99; there are: {STEPS // 2}, {STEPS}"):
        own.restore(saved[0], step=99, params_only=params_only)
    assert not own._engine.stages


def test_parameters_of_a_folder_without_checkpoints_are_refused_before_anything_is_compiled(saved, tmp_path):
    own = trainer(1)
    for folder, said in ((tmp_path, "no checkpoint is there to"), (saved[0] / str(STEPS), "is itself a")):
        with pytest.raises(rrfp.UsageError, match=f"{folder}:? {said}"):
            own.restore(folder, params_only=True)
    assert not own._engine.stages


def test_a_folder_of_something_else_is_refused(saved, tmp_path):
    run, own = tmp_path / "third", trainer(1)
    run.mkdir()
    (run / "metrics.jsonl").touch()
    refused = f"{run} has no checkpoint, but metrics.jsonl: "
    for said in (f"{refused}give a folder", f"{refused}did you mean {run}.checkpoints?"):
        with pytest.raises(rrfp.UsageError, match=re.escape(said)):
            own.restore(run)
        run.with_name("third.checkpoints").mkdir(exist_ok=True)
    with pytest.raises(rrfp.UsageError, match="is itself a checkpoint: give restore"):
        own.restore(saved[0] / str(STEPS))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: trainer(1, seed=1), ["seed=1", "seed=0"]),
        (
            lambda: trainer(1, optimizer=toy.optax.sgd(0.1)),
            ["no optimizer, or one without state (its optimizer.", "params_only=True"],
        ),
        (lambda: trainer(1, pipe=shorter()), ["another model: the checkpoint has 8 layers, this model 4 ("]),
    ],
    ids=["seed", "optimizer", "model"],
)
def test_another_run_is_refused(saved, other, said):
    with pytest.raises(rrfp.UsageError) as caught:
        other().restore(saved[0])
    assert all(text in str(caught.value) for text in said), caught.value


def test_saving_before_the_first_step_is_refused(tmp_path):
    with pytest.raises(rrfp.UsageError, match="before the first step"):
        trainer(1).save(tmp_path)


def test_other_data_is_said(saved, capsys):
    other = trainer(1, data=lambda step: toy.microbatches(3, seed=step))
    other.restore(saved[0])
    assert f"the data of step {STEPS - 1} is not what it was" in capsys.readouterr().out
