"""`rebalance=`: what is said, and what moves, once it has been decided (tests/sim/test_rebalance.py)."""

import gc
import threading
import time
import weakref
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.report.run_folder import read_run
from rrfp_jax.runtime.programs.compiler import IS_DROPPED
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.sim.splits import Move, RebalanceDecision, Verdict
from rrfp_jax.train.stepping import NOTHING_AHEAD
from tests.support import toy

BATCH = toy.microbatches(4)

NEVER = IS_DROPPED.get()


class Scripted:
    """Decides what it has been told to, look by look; notes what it is told of."""

    def __init__(self, *looks):
        self.looks, self.told, self.pauses = list(looks), [], []

    def __call__(self, compile_seconds):
        self.told.append("made")
        return self

    def look(self, steps, left):
        self.told.append((len(steps), left))
        return self.looks.pop(0) if self.looks else RebalanceDecision(100)

    def moved(self, move, pause, compile_seconds):
        self.told.append(("moved", move.split, pause > 0))
        self.pauses.append((pause, compile_seconds))

    def failed(self, move):
        self.told.append(("failed", move.split))


def to(*split, before=(4, 4), seconds=1.0, **kwargs):
    return RebalanceDecision(3, Move(before, split, seconds, 0.8 * seconds), **kwargs)


@pytest.fixture
def decides(monkeypatch):
    def script(*looks):
        found = Scripted(*looks)
        monkeypatch.setattr("rrfp_jax.train.tuning.Balance", found)
        monkeypatch.setattr("rrfp_jax.train.tuning.FIRST", 2)
        return found

    return script


def trainer(mode="auto", **settings):
    settings = {"data": BATCH, "split": [4, 4], "optimizer": optax.adamw(1e-2)} | settings
    return toy.trainer(2, rebalance=mode, **settings)


def until_moved(trainer, split):
    """Steps until another split is there, each with a pause in which to compile; their losses."""
    losses = []
    for report in trainer.steps(400):
        if trainer.split == split:
            return [*losses, report.loss]
        losses.append(report.loss)
        time.sleep(0.05)
    raise AssertionError(f"no move to {split}")


def test_layers_move_by_themselves_and_losses_are_those_of_a_move_by_hand(decides, capfd):
    decided = decides(to(3, 5))
    moving, by_hand = trainer(), trainer("off")
    losses = until_moved(moving, [3, 5])
    losses += [report.loss for report in moving.steps(2)]
    expected = [report.loss for report in by_hand.steps(len(losses) - 3)]
    by_hand.split = [3, 5]
    expected += [report.loss for report in by_hand.steps(3)]
    assert losses == expected
    assert decided.told[:3] == ["made", (2, 398), ("moved", (3, 5), True)]
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("rebalance: a step takes 1 s, and 0.8 s, 20.0% less, with split=3,5 instead of")
    assert said[1].startswith(f"rebalance: from step {len(losses) - 3} on split=3,5: layers have moved in ")


@pytest.mark.slow(reason="a Trainer of its own")
def test_nothing_refers_to_arrays_of_where_layers_were(decides):
    decides(to(3, 5), to(4, 4, before=(3, 5)))
    own = trainer()
    list(own.steps(2))
    before, arrays = weakref.ref(own._engine), live_bytes()
    gc.disable()
    try:
        until_moved(own, [3, 5])
        until_moved(own, [4, 4])
        own._stepper._ahead = NOTHING_AHEAD  # data of the next step, which is to come
        assert live_bytes() == arrays
    finally:
        gc.enable()
    gc.collect()
    assert before() is None


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_suggestion_is_made_once_and_says_what_to_do(decides, capfd):
    decides(to(3, 5), to(3, 5), to(5, 3))
    own = trainer("suggest")
    list(own.steps(9))
    assert own.split == [4, 4]
    said = capfd.readouterr().out.splitlines()
    assert [line.partition("less, with ")[2][:9] for line in said] == ["split=3,5", "split=5,3"]
    assert "set trainer.split = [3, 5], resume from a checkpoint with --config.split=3,5, or have" in said[0]


@pytest.mark.slow(reason="a Trainer of its own")
def test_what_came_of_it_is_said(decides, capfd):
    made = Move((4, 4), (3, 5), 1.0, 0.8)
    decides(
        RebalanceDecision(2, verdict=Verdict(made, 0.81)),
        RebalanceDecision(2, Move((3, 5), (4, 4), 1.1, 1.0, back=True), verdict=Verdict(made, 1.1)),
        RebalanceDecision(2, distrusted=0.12),
        RebalanceDecision(2, distrusted=0.13),
    )
    list(trainer("suggest").steps(10))
    kept, lost, back, distrusted = capfd.readouterr().out.splitlines()
    assert kept.endswith("19.0% less than before the move; 20.0% less was expected")
    assert "10.0% more than before" in lost and lost.endswith("twice as much is asked of a move")
    assert back == "rebalance: layers go back to split=4,4, where a step took 1 s"
    assert distrusted.startswith("rebalance: the simulator is 12% off")


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_what_cannot_be_compiled_is_said_and_training_goes_on(decides, capfd, monkeypatch):
    decided = decides(to(3, 5))

    def refused(*_):
        raise ValueError("no such program")

    own = trainer()
    list(own.steps(1))
    with monkeypatch.context() as patched:
        patched.setattr("rrfp_jax.runtime.stages.staging.Staging._compile_optimizer", refused)
        for _ in range(8):
            list(own.steps(1))
            time.sleep(0.05)
    assert own.split == [4, 4] and ("failed", (3, 5)) in decided.told
    assert "split=3,5 was rejected: ValueError: no such program" in capfd.readouterr().out


@pytest.mark.slow(reason="a Trainer of its own")
def test_layers_go_back_if_bytes_do_not_suffice_after_all(decides, capfd, monkeypatch):
    decided = decides(to(3, 5))
    own = trainer()
    list(own.steps(1))
    toy.refuse_bytes(monkeypatch, own, [3, 5])
    for _ in range(400):
        list(own.steps(1))
        time.sleep(0.05)
        if ("failed", (3, 5)) in decided.told:
            break
    assert own.split == [4, 4] and np.isfinite(next(own.steps(1)).loss)
    assert "split=3,5 was rejected: activation_budget=auto: stage 1 has too little" in capfd.readouterr().out


@pytest.mark.slow(reason="a Trainer of its own")
def test_what_cannot_be_looked_at_is_said_and_training_goes_on(decides, capfd, monkeypatch):
    decided = decides()

    def fails(steps, left):
        raise ZeroDivisionError("of a fit")

    monkeypatch.setattr(decided, "look", fails)
    assert len(list(trainer().steps(6))) == 6
    said = capfd.readouterr().out
    assert said.count("steps could not be looked at, so layers stay: ZeroDivisionError: of a fit") == 1


@pytest.mark.slow(reason="3 s: a Trainer of its own")
def test_somebody_else_may_set_the_split_meanwhile(decides):
    decided = decides(to(3, 5))
    own = trainer()
    list(own.steps(3))  # which has begun to compile
    own.split = [5, 3]
    list(own.steps(4))
    assert own.split == [5, 3] and not [told for told in decided.told if told[0] == "moved"]


@pytest.fixture
def slowly(monkeypatch):
    """Programs for another split wait until the test lets them; gives how many have been begun, and that."""
    compiled, let, begun = Executables.compiled, threading.Event(), []

    def waits(*args):
        if IS_DROPPED.get() is not NEVER:
            begun.append(args)
            let.wait(60)
        return compiled(*args)

    monkeypatch.setattr(Executables, "compiled", waits)
    yield begun, let
    let.set()


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_all_steps_beside_compiling_are_counted_though_few_are_recorded(decides, slowly, capfd):
    decided, (_, let) = decides(to(3, 5, seconds=1e-9)), slowly
    own = trainer()
    own._stepper.recorded = deque(maxlen=2)
    steps = list(own.steps(8))  # it compiles beside the latest six
    let.set()
    until(lambda: not compiles())
    next(own.steps(1))
    assert own.split == [3, 5] and "in 6 steps" in capfd.readouterr().out
    ((pause, compile_seconds),) = decided.pauses
    assert pause > sum(report.step_seconds for report in steps[2:])
    assert compile_seconds > sum(report.wall_seconds for report in steps[3:])


def until(seen):
    for _ in range(600):
        if seen():
            return
        time.sleep(0.01)
    raise AssertionError("it takes too long")


def compiles():
    return any("compiles for another split" in thread.name for thread in threading.enumerate())


def set_another(own, at_exit):
    own.split = [5, 3]
    list(own.steps(2))


ENDS = {
    "another split is set": set_another,
    "the Trainer is let go": lambda own, at_exit: own.__dict__.clear() or gc.collect(),
    "the interpreter ends": lambda own, at_exit: [call() for call in at_exit],
}


@pytest.mark.slow(reason="3 s: a Trainer of its own")
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_nobody_wants_any_more_is_not_compiled(decides, slowly, monkeypatch, ends):
    (begun, let), calls = slowly, []
    monkeypatch.setattr("threading._register_atexit", calls.append)
    decides(to(3, 5))
    own = trainer()
    list(own.steps(3))
    until(lambda: begun)
    ends(own, calls)
    time.sleep(3.0)  # all threads are at a program, or have ended, on a loaded machine, too
    count = len(begun)
    let.set()
    until(lambda: not compiles())
    assert len(begun) == count


def test_a_step_may_meet_another_shape_while_a_thread_asks_for_those_there_are():
    library = trainer("off")._engine.library
    library._programs = {(("a",), "train"): {}, (("b",), "evaluate"): {}}

    class Asked(str):
        """Compared in the middle of what is asked: then the step adds a shape."""

        def __eq__(self, phase):
            library._programs[("c",), "train"] = {}
            return str(self) == phase

        __hash__ = str.__hash__

    assert library.buckets(Asked("train")) == [("a",)]


@pytest.mark.slow(reason="a Trainer of its own")
def test_steps_that_are_given_one_by_one(decides):
    decided = decides()
    own = trainer("suggest")
    for _ in range(4):
        own.step(BATCH)
    assert decided.told[1] == (2, 2), "as many are expected as there have been"


@pytest.mark.slow(reason="a Trainer of its own; sim/test_rebalance.py has looks")
def test_an_unhurried_look_at_real_steps():
    own = trainer("suggest")
    list(own.steps(10))
    assert own._stepper._rebalancing.watched_seconds > 0


WIDTH, ROWS = 16, 8


def embed(weight, x, mb):
    return mb["x"] @ weight


def block(weight, x, mb):
    return jnp.tanh(x @ weight)


def plain_loss(x, mb):
    return rrfp.Loss(x.sum(), weight=x.shape[0])


def heavy_loss(x, mb):
    for _ in range(20):
        x = jnp.tanh(x @ (jnp.eye(WIDTH) * 0.5))
    return rrfp.Loss(x.sum(), weight=x.shape[0])


def trained(loss):
    layers = [
        rrfp.layer(embed, init=lambda key: jnp.eye(WIDTH)),
        rrfp.layer(block, init=lambda key: jnp.eye(WIDTH), repeat=4),
    ]
    trainer = rrfp.Trainer(rrfp.Pipeline(layers, loss), optax.sgd(1e-2), mesh=rrfp.Mesh(pp=2), split=(2, 3))
    return trainer, trainer.step([{"x": jnp.ones((ROWS, WIDTH))}] * 4)


def test_layers_by_name_with_what_they_take_and_hold():
    _, report = trained(plain_loss)
    work = report.recorded.work()
    assert [layer.name for layer in work.layers] == ["embed", *["block"] * 4]
    assert work.split == [2, 3] and work.measure == "block"
    blocks = [layer.estimate for layer in work.layers[1:]]
    assert blocks[:3] == [blocks[0]] * 3
    assert 0.85 * blocks[0] < blocks[3] < blocks[0], "its backward, which does its forward, reads less"
    assert work.layers[1].held_bytes > 0
    assert report.recorded.work() is work, "it is found out once"


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_a_last_layer_with_a_loss_that_counts_is_another_kind():
    _, report = trained(heavy_loss)
    layers = report.recorded.work().layers
    assert layers[-1].name == "block and loss" and layers[-1].estimate > 2 * layers[-2].estimate


def test_a_trace_has_it(tmp_path):
    trainer, report = trained(plain_loss)
    trainer.write_trace(tmp_path / "steps.msgpack")
    (step,) = read_run(tmp_path / "steps.msgpack").steps
    assert step.recorded.work() == report.recorded.work()


def test_a_model_that_cannot_be_analysed_trains_all_the_same(monkeypatch, tmp_path):
    def fails(*arguments, **more):
        raise NotImplementedError("no rule for this operation")

    monkeypatch.setattr("rrfp_jax.forecast.costs.PaperSegments", fails)
    trainer, report = trained(plain_loss)
    assert report.recorded.work() is None and report.explain().sentence
    trainer.write_trace(tmp_path / "steps.msgpack")
    assert read_run(tmp_path / "steps.msgpack").steps[0].recorded.work() is None


def test_what_cannot_be_is_refused():
    with pytest.raises(rrfp.UsageError, match="rebalance='always': choose 'off', 'suggest' or 'auto'"):
        toy.trainer(2, rebalance="always")
    with pytest.raises(rrfp.UsageError, match="rebalance='auto' with stages of 1, 2 devices"):
        toy.trainer(2, rebalance="auto", mesh=rrfp.Mesh(pp=2, tp=(1, 2)))
