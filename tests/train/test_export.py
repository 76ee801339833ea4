"""The model taken out: of a Trainer or a folder, in one process or of several, into plain flax."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.runtime.model.layers import MicrobatchView
from rrfp_jax.train.exporting import whole_params
from tests.support import zoo

VARIANTS = {
    "plain": {},
    "frozen-and-tied": zoo.FROZEN_AND_TIED,
    "tp": {**zoo.SPREAD, **zoo.FROZEN_AND_TIED},
}


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request, tmp_path_factory):
    """A Trainer after two steps, and the folder of its checkpoint."""
    pipe = zoo.pipeline(**VARIANTS[request.param])
    mesh = rrfp.Mesh(pp=2, tp=2 if request.param == "tp" else 1)
    trainer = rrfp.Trainer(pipe, optax.adam(1e-2), data=zoo.microbatches, mesh=mesh)
    list(trainer.steps(2))
    folder = tmp_path_factory.mktemp("export") / "checkpoints"
    trainer.save(folder)
    return trainer, folder


def bits(leaf):
    return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()


def test_the_parameters_are_those_of_the_trainer(trained):
    trainer, _ = trained
    for index, (state, exported) in enumerate(zip(trainer.params(), rrfp.export(trainer), strict=True)):
        own = jax.tree.leaves(trainer.stage_params[str(index)])
        assert [bits(leaf) for leaf in jax.tree.leaves(state)] == [bits(leaf) for leaf in own]
        assert jax.tree.map(bits, exported) == jax.tree.map(bits, state)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_plain_flax_gives_equal_logits_by_every_way(trained):
    trainer, folder = trained
    pipe, params = trainer._engine.pipe, whole_params(trainer._engine)
    carry = None
    for index in range(len(pipe)):
        mb = MicrobatchView({"tokens": zoo.TOKENS}, np.zeros(3, np.uint32), index, training=False)
        carry, _ = pipe.apply_layer(index, params[str(index)], carry, mb)
    expected = np.asarray(carry).tobytes()
    assert zoo.plain_logits(rrfp.export(trainer)).tobytes() == expected
    assert zoo.plain_logits(rrfp.export(folder, pipe=pipe)).tobytes() == expected
    assert zoo.plain_logits(rrfp.export(folder / "2")).tobytes() == expected
    assert zoo.logits_of(trainer.params(modules=True)).tobytes() == expected
    assert zoo.logits_of(rrfp.export(folder, pipe=pipe, step=2, modules=True)).tobytes() == expected


def test_the_loss_is_that_of_an_evaluation(trained):
    trainer, _ = trained
    batch = [{"tokens": zoo.TOKENS, "labels": zoo.TOKENS}]
    logits = zoo.plain_logits(rrfp.export(trainer))
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, zoo.TOKENS).mean()
    assert trainer.evaluate(batch).loss == pytest.approx(float(expected), rel=1e-5)


def test_modules_are_the_users_own(trained):
    embed, dense, *_ = rrfp.export(trained[0], modules=True)
    assert isinstance(embed, zoo.Embed) and isinstance(embed.tables, nnx.List)
    assert isinstance(dense, zoo.Dense) and dense.variables["params"]["Dense_0"]["bias"].shape == (zoo.WIDTH,)
    jax.jit(lambda tokens: embed(None, {"tokens": tokens}))(zoo.TOKENS)


def test_an_evaluation_batch_is_what_layers_read_of_a_microbatch():
    def layer(carry, mb):
        return mb["x"] * mb.training, mb.get("absent"), jax.random.uniform(mb.key)

    batch = rrfp.EvaluationBatch({"x": np.ones(2, np.float32)})
    plain, traced = layer(None, batch), jax.jit(layer)(None, batch)
    assert plain[0].tolist() == traced[0].tolist() == [0, 0] and plain[1] is traced[1] is None
    assert float(plain[2]) == float(traced[2]) and [*batch] == ["x"]


def test_tied_parameters_are_one(trained):
    trainer, folder = trained
    if trainer._engine.pipe.tied:
        for states in (rrfp.export(trainer), rrfp.export(folder)):
            assert bits(states[0]["tables"][1]["embedding"]) == bits(states[5])
        states, first = rrfp.export(trainer), rrfp.Trainer(trainer._engine.pipe, data=zoo.microbatches)
        first.start()
        frozen = rrfp.export(first)
        assert bits(states[0]["tables"][0]["embedding"]) == bits(frozen[0]["tables"][0]["embedding"])
        assert bits(states[5]) != bits(frozen[5])
