"""A split that is set between steps: what is equal to the bit, what is refused, what is let go."""

import json

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rrfp_jax as rrfp
from rrfp_jax.runtime.stages import leaves as moving
from rrfp_jax.runtime.stages.leaves import transfers
from rrfp_jax.runtime.stages.stage import Leaf
from tests.runtime.test_interrupts import interrupt_after
from tests.scripts.moving_ranks import AFTER, BEFORE, BY_THEMSELVES
from tests.support import sharded, toy
from tests.support.decided_moves import forgets_its_engine
from tests.support.selected import selected
from tests.train.test_processes import SCRIPTS, command

BATCH = toy.microbatches(4)

CASES = {
    "plain": (2, {}, [4, 4], [[6, 2]]),
    "past a stage": (4, {}, [5, 1, 1, 1], [[1, 1, 1, 5]]),
    "tied": (2, {"pipe": toy.tied_pipeline()}, [4, 4], [[6, 2]]),
    "frozen, first stage alone": (2, {"pipe": toy.pipeline(frozen=["0.*", "1.*"])}, [2, 6], [[5, 3], [1, 7]]),
    "two chunks": (2, {"schedule": "zb-v"}, [2, 2, 2, 2], [[1, 3, 1, 3]]),
    "replicas": (2, {"mesh": rrfp.Mesh(pp=2, dp=2)}, [4, 4], [[2, 6]]),
    "replicas that share the state": (
        2,
        {"mesh": rrfp.Mesh(pp=2, dp=2, shard_optimizer=True)},
        [4, 4],
        [[2, 6]],
    ),
    "spread": (2, {"mesh": rrfp.Mesh(pp=2, tp=2), "pipe": sharded.pipeline()}, [4, 4], [[2, 6]]),
}


@pytest.mark.slow(reason="4 s; test_interrupts.py has other moments")
def test_control_c_during_a_move_comes_after_it(monkeypatch):
    one, other = (toy.trainer(2, data=BATCH, split=[4, 4]) for _ in range(2))
    for own in (one, other):
        list(own.steps(1))
    interrupt_after(monkeypatch, moving, "move")
    with pytest.raises(KeyboardInterrupt):
        one.split = [6, 2]
    other.split = [6, 2]
    assert one.split == [6, 2]
    assert [own.loss for own in one.steps(2)] == [own.loss for own in other.steps(2)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[] if case == "plain" else pytest.mark.slow(reason="5 s; `plain` moves layers")
        )
        for case in CASES
    ],
)
def test_steps_after_moves_are_those_of_a_run_that_goes_on_with_this_split(case, tmp_path):
    stages, settings, first, later = CASES[case]

    def trainer(split):
        optimizer = optax.adamw(1e-2)
        return toy.trainer(stages, optimizer=optimizer, data=BATCH, split=split, **settings)

    moved = trainer(first)
    list(moved.steps(2))
    moved.evaluate(BATCH)
    for split in later:
        moved.save(tmp_path)
        moved.split = split
        assert moved.split == split
        restored = trainer(split)
        restored.restore(tmp_path)
        losses = [[report.loss for report in one.steps(2)] for one in (moved, restored)]
        assert losses[0] == losses[1]
        assert moved.evaluate(BATCH).loss == restored.evaluate(BATCH).loss
        for one, other in zip(toy.arrays(moved), toy.arrays(restored), strict=True):
            assert one.sharding == other.sharding
            np.testing.assert_array_equal(one, other)


def with_typed_keys():
    """Like `optax.adamw`, with a random key of the new kind in its state."""

    def init(params):
        return jax.random.key(3)

    def update(updates, key, params=None):
        return updates, jax.random.split(key)[0]

    return optax.chain(optax.adamw(1e-2), optax.GradientTransformation(init, update))


@pytest.mark.slow(reason="3 s: two Trainers")
@pytest.mark.parametrize("share_devices", [False, True])
def test_state_of_no_layer_goes_to_a_stage_that_had_none(share_devices):
    mesh = rrfp.Mesh(pp=2, share_devices=share_devices)
    pipe = toy.pipeline(frozen=["0.*", "1.*"])
    trainer = toy.trainer(pipe=pipe, optimizer=with_typed_keys(), data=BATCH, split=[2, 6], mesh=mesh)
    list(trainer.steps(1))
    trainer.split = [5, 3]
    assert len(list(trainer.steps(2))) == 2
    first, second = (jax.tree.leaves(own.tree) for own in trainer._engine.optimizers)
    keys = [leaf for leaf in (*first, *second) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert len(keys) == 2
    np.testing.assert_array_equal(*map(jax.random.key_data, keys))


@pytest.mark.slow(reason="a Trainer of its own")
def test_layers_lost_on_their_way_are_not_made_anew(monkeypatch):
    trainer = toy.trainer(2, data=BATCH, split=[4, 4])
    list(trainer.steps(1))

    def lost(*_):
        raise rrfp.TrainingError("the link is gone")

    monkeypatch.setattr("rrfp_jax.runtime.stages.leaves.move", lost)
    with pytest.raises(rrfp.TrainingError, match="the link is gone"):
        trainer.split = [3, 5]
    for again in (lambda: list(trainer.steps(1)), lambda: setattr(trainer, "split", [5, 3])):
        with pytest.raises(rrfp.TrainingError, match="were lost on their way"):
            again()


@pytest.mark.slow(reason="a Trainer of its own")
def test_what_cannot_be_compiled_changes_nothing(monkeypatch):
    trainer = toy.trainer(2, data=BATCH, split=[4, 4])
    list(trainer.steps(1))

    def refused(*_):
        raise ValueError("no such program")

    with monkeypatch.context() as patched:
        patched.setattr("rrfp_jax.runtime.stages.staging.Staging._compile_optimizer", refused)
        with pytest.raises(ValueError, match="no such program"):
            trainer.split = [3, 5]
    assert trainer.split == [4, 4]
    assert np.isfinite(next(trainer.steps(1)).loss)


@pytest.mark.slow(reason="a Trainer that measures")
def test_the_hint_that_costs_choose_waits_for_costs_of_this_split():
    trainer = toy.trainer(2, data=BATCH, split=[4, 4], schedule="auto")
    list(trainer.steps(2))
    trainer.split = [3, 5]
    assert len(list(trainer.steps(3))) == 3


@pytest.mark.slow(reason="4 s: two Trainers")
def test_a_split_that_is_noted_before_a_checkpoint_is_taken(tmp_path):
    first = toy.trainer(2, data=BATCH, split=[4, 4])
    list(first.steps(1))
    first.save(tmp_path)
    trainer = toy.trainer(2, data=BATCH)
    trainer.split = [7, 1]
    assert trainer.restore(tmp_path)
    assert trainer.steps_done == 1


@pytest.mark.slow(reason="two Trainers")
def test_layers_that_move_to_and_fro_leave_losses_as_they_would_be():
    moving, staying = (toy.trainer(2, data=BATCH, split=[4, 4]) for _ in range(2))
    found = []
    for step in range(6):
        moving.split = [3, 5] if step % 2 else [4, 4]
        found += [report.loss for report in moving.steps(1)]
    assert moving.steps_done == 6
    expected = [report.loss for report in staying.steps(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # other splits are other programs


def test_before_the_first_step_the_split_is_only_noted():
    trainer = toy.trainer(2, data=BATCH)
    trainer.split = [7, 1]
    assert not trainer._engine.stages
    assert np.isfinite(next(trainer.steps(1)).loss)
    assert {*trainer._engine.stages[1].params} == {"7"}


@pytest.mark.parametrize(
    ("split", "said"),
    [([4, 5], "add up to 8"), ([8], "give 2"), ([0, 8], "positive"), ("auto", "give a list")],
)
def test_a_split_that_cannot_be_changes_nothing(split, said):
    trainer = toy.trainer(2, data=BATCH, split=[4, 4])
    first = next(trainer.steps(1)).loss
    with pytest.raises(rrfp.UsageError, match=said):
        trainer.split = split
    assert trainer.split == [4, 4]
    assert next(trainer.steps(1)).loss != first


def test_a_split_for_which_bytes_do_not_suffice_changes_nothing(monkeypatch):
    trainer = toy.trainer(2, data=BATCH, split=[4, 4])
    list(trainer.steps(1))
    toy.refuse_bytes(monkeypatch, trainer, [3, 5])
    with pytest.raises(rrfp.UsageError, match="too little"):
        trainer.split = [3, 5]
    assert trainer.split == [4, 4] and np.isfinite(next(trainer.steps(1)).loss)


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_stages_of_other_widths_are_refused_before_anything_moves():
    trainer = toy.trainer(2, data=BATCH, split=[4, 4], mesh=rrfp.Mesh(pp=2, tp=(1, 2)))
    list(trainer.steps(1))
    with pytest.raises(rrfp.UsageError, match="on 1 devices, to stage 1, on 2"):
        trainer.split = [3, 5]
    assert np.isfinite(next(trainer.steps(1)).loss)


@pytest.mark.slow(reason="a Trainer of its own")
def test_nothing_stays_of_where_layers_were():
    assert forgets_its_engine(toy.trainer(2, data=BATCH, split=[4, 4]), [3, 5])


PROCESSES, CASES_OF_PROCESSES = 4, ("tied", "spread")  # moving_ranks.py has more


@pytest.fixture(scope="module")
def moved_between_processes(request, tmp_path_factory):
    """What every rank found, of the cases that are to run."""
    folder = tmp_path_factory.mktemp("moving")
    launch = ["rrfp_jax", "launch", "-n", PROCESSES, SCRIPTS / "moving_ranks.py", folder]
    status, said = command(*launch, *selected(request, "case_of_processes"), BY_THEMSELVES, folder=folder)
    assert status == 0, said
    return [json.loads((folder / f"moving-{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.slow(reason="a run of four processes; in one, the tests above")
@pytest.mark.parametrize("case_of_processes", CASES_OF_PROCESSES)
def test_layers_move_between_processes(moved_between_processes, case_of_processes):
    for rank in moved_between_processes:
        moved, restored = rank[case_of_processes]["losses"]
        assert moved == restored
        assert len(rank[case_of_processes]["equal"]) > 2
        assert all(rank[case_of_processes]["equal"])


@pytest.mark.slow(reason="10 s: processes; test_processes.py moves layers between two")
def test_processes_move_layers_before_the_same_step(moved_between_processes):
    found = [rank[BY_THEMSELVES] for rank in moved_between_processes]
    assert found[1:] == found[:1] * (len(found) - 1)
    splits = [split for split, _ in found[0]]
    assert splits == [BEFORE] * (len(splits) - 2) + [AFTER] * 2


@st.composite
def splits(draw):
    """Two ways to deal six layers with two leaves each to three stages, and one leaf that all have."""
    stages = [draw(st.lists(st.integers(0, 2), min_size=6, max_size=6)) for _ in range(2)]
    found = []
    for own in stages:
        leaves = [[Leaf(i, False, n) for i in range(6) if own[i] == s for n in (0, 1)] for s in range(3)]
        found.append([[*mine, Leaf(-1, True, 0)] if mine else [] for mine in leaves])
    return found


@given(splits())
def test_after_all_ways_every_stage_has_what_it_should(case):
    before, after = case
    has = [set(own) for own in before]
    for leaf, source, target, *_ in transfers(before, after):
        assert leaf in before[source]
        assert leaf not in has[target]
        has[target].add(leaf)
    for own, wanted in zip(has, after, strict=True):
        assert own >= set(wanted)
