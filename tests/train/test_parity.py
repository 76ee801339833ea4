"""The pipeline against one unpipelined `jax.value_and_grad` over the whole batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.stages.step import ModelStep
from rrfp_jax.runtime.transport.protocol import LocalTransport
from rrfp_jax.train.reference import leaf_errors
from tests.support import toy

SPLITS = [(1, None), (2, None), (2, (1, 7)), (4, None), (4, (1, 4, 2, 1))]
SCHEDULES = ["gpipe", "1f1b", "bf"]


def compare(trainer, batch):
    loss, gradient = trainer.value_and_grad(batch)
    expected_loss, expected = toy.reference(trainer.stage_params, batch)
    return abs(loss - float(expected_loss)) / abs(float(expected_loss)), toy.worst_leaf(gradient, expected)


def agrees(trainer, batch):
    loss_error, leaf_error = compare(trainer, batch)
    return loss_error <= 1e-6 and leaf_error <= 1e-5


@pytest.fixture(scope="module")
def four_stages():
    trainer = toy.trainer(4)
    trainer.start()
    return trainer


@pytest.mark.parametrize(("stages", "split"), SPLITS)
def test_gradients_are_those_of_the_whole_batch(stages, split, four_stages):
    trainer = four_stages if (stages, split) == (4, None) else toy.trainer(stages, split=split)
    batch = toy.microbatches(7)
    gradients = []
    for name in SCHEDULES:
        trainer.schedule = rrfp.schedules.by_name(name)
        loss_error, leaf_error = compare(trainer, batch)
        assert loss_error <= 1e-6, name
        assert leaf_error <= 1e-5, name
        gradients.append(trainer.value_and_grad(batch)[1])
    for other in gradients[1:]:  # and, added in microbatch order, equal to the bit across schedules
        chex.assert_trees_all_equal(gradients[0], other)


def drop_gradients(monkeypatch, dropped):
    """Park the gradients of some stages and microbatches for ever, whether it is their turn or not."""
    run, accumulate = ModelStep.run, ModelStep.accumulate

    def all_but_those(self, task, in_turn):
        return run(self, task, in_turn and not dropped(self.stage.index, task.microbatch))

    def nor_later(self, chunk, microbatch):
        if not dropped(self.stage.index, microbatch):
            accumulate(self, chunk, microbatch)

    monkeypatch.setattr(ModelStep, "run", all_but_those)
    monkeypatch.setattr(ModelStep, "accumulate", nor_later)


class TestBrokenVariantsAreCaught:
    """The same comparison fails when the runtime does one of the classic wrong things."""

    @pytest.mark.slow(reason="3 s: test_check_agrees_and_tells_bytes has one")
    def test_the_intact_one_passes(self, four_stages):
        assert agrees(four_stages, toy.microbatches())

    @pytest.mark.slow(reason="2 s: a mutant of tests/verification/bugs.md")
    def test_a_dropped_microbatch(self, four_stages, monkeypatch):
        drop_gradients(monkeypatch, lambda stage, microbatch: stage == 2 and microbatch == 1)
        assert not agrees(four_stages, toy.microbatches())

    @pytest.mark.slow(reason="2 s: a mutant of tests/verification/bugs.md")
    def test_a_mean_of_means(self):
        def mean(logits, mb):
            total, weight = toy.sums(logits, mb)
            return rrfp.Loss(total / weight, weight=1.0)

        trainer = toy.trainer(4, pipe=toy.pipeline(mean, additive=False))
        assert not agrees(trainer, toy.microbatches())

    def test_two_microbatches_swapped_between_stages(self, four_stages, monkeypatch):
        offer, held = LocalTransport.offer, {}

        def swapping(self, key, arrays):
            if key.stage == 2 and key.input.direction == 0 and key.input.microbatch in (0, 1):
                held[key] = arrays
                if len(held) == 2:
                    (a, x), (b, y) = held.items()
                    offer(self, a, y)
                    offer(self, b, x)
                    self.produced(a, 0.0)
                    self.produced(b, 0.0)
            else:
                offer(self, key, arrays)

        monkeypatch.setattr(LocalTransport, "offer", swapping)
        assert not agrees(four_stages, toy.microbatches())
        assert len(held) == 2


@pytest.mark.slow(reason="4 s; test_numbers.py has clipping")
def test_training_equals_plain_optax_with_global_norm_clipping():
    trainer = toy.trainer(4, clip_norm=0.3)
    params = jax.device_get(trainer_params(trainer))
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))
    state = optimizer.init(params)
    for report in trainer.steps(4):
        loss, gradient = toy.reference(params, toy.microbatches(seed=report.step))
        assert report.loss == pytest.approx(float(loss), rel=1e-5)
        assert report.gradient_norm == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for got, expected in zip(jax.tree.leaves(trainer.stage_params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def trainer_params(trainer):
    trainer.start()
    return trainer.stage_params


@pytest.mark.parametrize("stages", [1, 3])
def test_initial_values_do_not_depend_on_the_split(stages, four_stages):
    chex.assert_trees_all_equal(trainer_params(toy.trainer(stages)), four_stages.stage_params)


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_layer_that_stands_several_times_is_as_many_layers(four_stages):
    first, *_, last = toy.layers()
    turns = [rrfp.layer(toy.block, init=toy.block_init), rrfp.layer(toy.block, init=toy.block_init)] * 3
    trainer = toy.trainer(1, pipe=rrfp.Pipeline([first, *turns, last], toy.loss))
    trainer.start()
    repeated = toy.initial_params(four_stages)
    chex.assert_trees_all_equal(jax.device_get(trainer.stage_params), jax.device_get(repeated))
    assert (repeated["1"]["up"] != repeated["3"]["up"]).all()


def test_check_agrees_and_tells_bytes(four_stages, capsys):
    report = four_stages.check()
    assert report.ok
    assert "agrees with unpipelined JAX" in capsys.readouterr().out
    assert [s.parameters for s in report.stages] == [1248, 2080, 2080, 1248]


def test_check_notices_a_wrong_gradient(four_stages, monkeypatch):
    drop_gradients(monkeypatch, lambda stage, microbatch: True)
    assert not four_stages.check().ok


@pytest.mark.parametrize(("found", "error"), [(3 + 4j, 0), (3 - 4j, 8 / 5)])
def test_a_complex_gradient_is_compared_with_its_imaginary_part(found, error):
    found, expected = ({"0": {"w": np.array([value], np.complex64)}} for value in (found, 3 + 4j))
    assert leaf_errors(found, expected) == {"0.w": pytest.approx(error)}


def attention(params, carry, mb):
    """Softmax over keys: what is added to a whole row changes nothing, so a key's bias has no effect."""
    query, key = (mb["x"] @ params[name] + params[f"{name}_bias"] for name in ("query", "key"))
    return jax.nn.softmax(query @ key.T) @ (mb["x"] @ params["value"])


def attention_init(key):
    matrices = zip(("query", "key", "value"), jax.random.split(key, 3), strict=True)
    biases = {f"{name}_bias": jnp.ones(4) for name in ("query", "key")}
    return {name: jax.random.normal(own, (4, 4)) for name, own in matrices} | biases


def cancelling(params, carry, mb):
    """What is left of two large numbers: its last bits, and those of its gradient, are nobody's."""
    x = mb["x"] if carry is None else carry
    return (x @ params["w"] + 1e4) - 1e4 * params["one"]


def cancelling_init(key):
    return {"w": jax.random.normal(key, (4, 4)), "one": jnp.ones(())}


@pytest.mark.parametrize(("layer", "init"), [(attention, attention_init), (cancelling, cancelling_init)])
def test_check_finds_nothing_where_plain_jax_itself_varies(layer, init):
    """A gradient that is zero in truth, and an ill-conditioned function."""

    def last(params, carry, mb):
        return carry @ params["w"]

    def loss(carry, mb):
        return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])

    layers = [rrfp.layer(layer, init=init), rrfp.layer(last, init=lambda key: {"w": jnp.eye(4)})]
    draw = np.random.default_rng(0)
    batch = [{"x": draw.standard_normal((3, 4)).astype(np.float32)} for _ in range(3)]
    pipe = rrfp.Pipeline(layers, loss, additive=False)
    assert toy.trainer(2, pipe=pipe, data=batch).check().ok
