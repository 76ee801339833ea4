"""Models taken out into plain flax, and parameters put in: of a Trainer, a folder, or what others wrote."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import rrfp_jax as rrfp
from rrfp_jax.checkpoint.format import StoredLayer, run_state
from rrfp_jax.runtime.model.layers import MicrobatchView
from rrfp_jax.train.exporting import whole_params
from tests.support import zoo
from tests.train.test_processes import SCRIPTS, command

SAVING = ".9.saving"


def made(mesh=None, optimizer=None, init=None, **kwargs):
    return rrfp.Trainer(zoo.pipeline(**kwargs), optimizer, data=zoo.microbatches, mesh=mesh, init=init)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model's states, and its checkpoints' folder; nothing was tied."""
    trainer = made(rrfp.Mesh(pp=2), optax.adam(1e-2))
    list(trainer.steps(2))
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    trainer.save(folder)
    (folder / SAVING).mkdir()
    return rrfp.export(trainer), folder


def bits(states):
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(states)]


def anchored():
    """An optimizer that keeps the first parameters and goes back to them."""

    def update(gradients, state, params):
        return jax.tree.map(lambda first, now: first - now, state, params), state

    return optax.GradientTransformation(lambda params: params, update)


class TestParamsOnly:
    @pytest.mark.slow(reason="7 s: two Trainers")
    @pytest.mark.parametrize(
        ("mesh", "optimizer"),
        [(rrfp.Mesh(), None), (rrfp.Mesh(pp=2, tp=2), optax.sgd(0.1)), (rrfp.Mesh(pp=3), anchored())],
        ids=["none", "sgd-tp", "anchored"],
    )
    def test_on_another_mesh_with_another_optimizer(self, saved, mesh, optimizer):
        states, folder = saved
        trainer = made(mesh, optimizer, **zoo.SPREAD)
        trainer.restore(folder, params_only=True)
        assert bits(rrfp.export(trainer)) == bits(states)
        assert trainer.steps_done == 0
        assert (folder / SAVING).exists(), "what another run saves just now is not ours to remove"
        if optimizer is not None:
            assert [report.step for report in trainer.steps(1)] == [0]
            moved = bits(rrfp.export(trainer)) != bits(states)
            assert moved == (mesh.tp > 1), "an optimizer that begins anew begins with these parameters"

    def test_what_was_not_tied_is_tied_now(self, saved):
        states, folder = saved
        trainer = made(rrfp.Mesh(pp=2), **zoo.FROZEN_AND_TIED)
        trainer.restore(folder, params_only=True)
        found = rrfp.export(trainer)
        assert bits(found[5]) == bits(states[0]["tables"][1]["embedding"]) != bits(states[5])

    def test_refusals(self, saved, tmp_path):
        trainer = made()
        with pytest.raises(rrfp.UsageError, match="no checkpoint is there to take parameters from"):
            trainer.restore(tmp_path, params_only=True)
        trainer._stepper.steps_done = 1
        with pytest.raises(rrfp.UsageError, match=r"params_only=True\) after 1 steps"):
            trainer.restore(saved[1], params_only=True)


class TestInit:
    def test_from_another_runs_checkpoint(self, saved):
        states, folder = saved
        init = rrfp.weights.checkpoint(folder, lambda path: None if path == "5" else path)
        trainer = made(rrfp.Mesh(pp=2), init=init)
        trainer.start()
        found = rrfp.export(trainer)
        assert bits(found[:5]) == bits(states[:5])
        assert not np.asarray(found[5]).any()  # a new head, with its own values

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda folder: rrfp.weights.checkpoint(folder.parent), "no checkpoint is there"),
            (
                lambda folder: rrfp.weights.checkpoint(folder, step=3),
                "no checkpoint of step 3 is there; there are: 2",
            ),
            (lambda folder: rrfp.weights.checkpoint(5), "give a folder of checkpoints"),
            (lambda folder: rrfp.weights.checkpoint(folder, 5), "names=5"),
            (rrfp.weights.orbax, r"it has items, give one: .*/2$"),
            (lambda folder: rrfp.weights.orbax(folder / "3"), "no arrays that orbax has saved"),
            (lambda folder: rrfp.weights.orbax(5), "give the path"),
            (lambda folder: rrfp.export(folder.parent), "no checkpoint is there"),
            (lambda folder: rrfp.export(folder, modules=True), "give pipe=, the model"),
            (lambda folder: rrfp.export(folder, pipe=5), "pipe is of type int"),
            (lambda folder: rrfp.export(folder, pipe=other()), "lacks params.1.w; its params.0.scale is not"),
            (lambda folder: rrfp.export(made()), "call start"),
            (lambda folder: rrfp.export(made(), step=3), "leave them out"),
        ],
    )
    def test_refusals(self, saved, wrong, said):
        with pytest.raises(rrfp.UsageError, match=said):
            wrong(saved[1])

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (lambda path: path, "no tensor '1.Dense_0.bias' in .*, but there is 'params.1.Dense_0.bias'"),
            (lambda path: "params.5", r"1.Dense_0.bias has the shape \[8\], tensor 'params.5' \[12, 8\]"),
        ],
        ids=["missing", "shape"],
    )
    def test_arrays_that_do_not_fit(self, saved, names, said):
        init = rrfp.weights.orbax(saved[1] / "2", names)
        with pytest.raises(rrfp.UsageError, match=said):
            init("1.Dense_0.bias", jax.ShapeDtypeStruct((zoo.WIDTH,), np.float32))

    def test_orbax_reads_lists_scalars_and_bfloat16(self, tmp_path):
        import orbax.checkpoint as ocp  # takes long, and every worker imports this file

        tree = {"a": [np.float32(3.0), {"b": np.ones(2, "bfloat16")}], "x.y": np.zeros(1)}
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "theirs", tree)
        init = rrfp.weights.orbax(tmp_path / "theirs")
        assert init("a.0", jax.ShapeDtypeStruct((), np.float32)) == 3.0
        assert init("a.1.b", jax.ShapeDtypeStruct((2,), np.dtype("bfloat16"))).dtype == "bfloat16"
        assert init("x.y", jax.ShapeDtypeStruct((1,), np.float32)).tolist() == [0.0]

    def test_what_flax_models_leave_with_orbax(self, tmp_path):
        """An `nnx.State`, Linen's variables, a TrainState: each array by the keys that lead to it."""
        import orbax.checkpoint as ocp

        dense = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        kernel, spec = dense.kernel[...], jax.ShapeDtypeStruct((2, 3), np.float32)
        module = nnx.Module()
        module.blocks = nnx.List([dense])
        linen = {"params": {"Dense_0": {"kernel": kernel}}}
        state = TrainState.create(apply_fn=None, params=linen["params"], tx=optax.adam(0.1))
        stored = {"nnx": nnx.state(module), "linen": linen, "state": state}
        for saver in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
            for name, tree in stored.items():
                with saver() as checkpointer:
                    checkpointer.save(tmp_path / saver.__name__ / name, tree)
                named = "blocks.0.kernel" if name == "nnx" else "params.Dense_0.kernel"
                init = rrfp.weights.orbax(tmp_path / saver.__name__ / name, {"3.w": named})
                np.testing.assert_array_equal(init("3.w", spec), kernel)

    def test_all_names_that_do_not_fit_are_told_before_anything_compiles(self, saved):
        init = rrfp.weights.orbax(saved[1] / "2", lambda path: f"params.{path}".replace("Dense_0", "Dense"))
        with pytest.raises(rrfp.UsageError) as refused:
            made(init=init)
        assert str(refused.value).count("no tensor 'params.") == 4


def other():
    return rrfp.Pipeline(
        [rrfp.layer(zoo.doubled), rrfp.layer(zoo.pair, init=lambda key: {"w": key})], zoo.loss
    )


def test_checkpoints_of_the_first_versions(monkeypatch, tmp_path):
    stored = {"step": 3, "data": 3, "seed": 0, "standing": {}, "config": None, "plan_hash": ""}
    assert run_state(stored, 3).layers == ()
    monkeypatch.setattr("rrfp_jax.train.stepping.stored_layers", lambda engine: ())
    trainer = made()
    trainer.start()
    trainer.save(tmp_path)
    with pytest.raises(rrfp.UsageError, match=r"by an earlier version.*give pipe="):
        rrfp.export(tmp_path)
    assert bits(rrfp.export(tmp_path, pipe=trainer._engine.pipe)) == bits(rrfp.export(trainer))


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_checkpoint_that_tells_of_other_layers_than_it_has(monkeypatch, tmp_path):
    told = (StoredLayer(kind="nnx", paths=(("scale",), ("tables", 0))),)
    monkeypatch.setattr("rrfp_jax.train.stepping.stored_layers", lambda engine: told)
    trainer = made()
    trainer.start()
    trainer.save(tmp_path)
    with pytest.raises(rrfp.UsageError, match=r"/0: its layers have other arrays than it says; give pipe="):
        rrfp.export(tmp_path)


@pytest.mark.slow(reason="two runs of two processes")
def test_two_processes(saved, tmp_path):
    """Both get the whole model, also of a stage that they share, and each reads what its stages own."""
    import orbax.checkpoint as ocp

    states, _ = saved
    tree = {"model": {str(i): jax.device_get(own) for i, own in enumerate(plain_trees(states))}}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "theirs", tree)
    script = SCRIPTS / "taken_out.py"
    status, said = command("rrfp_jax", "launch", "-n", 2, script, tmp_path, folder=tmp_path)
    assert status == 0, said
    first, second = (json.loads((tmp_path / f"taken-out-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["stages"] == first["restored"] == zoo.digest(rrfp.export(tmp_path / "stages"))
    spread = rrfp.export(tmp_path / "spread")
    assert first["spread"] == zoo.digest(spread)
    assert first["mixed"][:5] == [zoo.digest(own) for own in (spread[0], *states[1:3], spread[3], {})]
    assert [own["learning_rate"] for own in first["hyperparams"]] == pytest.approx([0.01, 0.009])
    assert first["steps"] == [1]


def plain_trees(states):
    """Exported states as the layers' own trees."""
    from flax import nnx

    for state in states:
        if isinstance(state, nnx.State):
            yield nnx.to_pure_dict(state)
        else:
            yield state["params"] if isinstance(state, dict) and "params" in state else state


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


def bits_of(leaf):
    return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()


def test_the_parameters_are_those_of_the_trainer(trained):
    trainer, _ = trained
    for index, (state, exported) in enumerate(zip(trainer.params(), rrfp.export(trainer), strict=True)):
        own = jax.tree.leaves(trainer.stage_params[str(index)])
        assert [bits_of(leaf) for leaf in jax.tree.leaves(state)] == [bits_of(leaf) for leaf in own]
        assert jax.tree.map(bits_of, exported) == jax.tree.map(bits_of, state)
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
            assert bits_of(states[0]["tables"][1]["embedding"]) == bits_of(states[5])
        states, first = rrfp.export(trainer), rrfp.Trainer(trainer._engine.pipe, data=zoo.microbatches)
        first.start()
        frozen = rrfp.export(first)
        assert bits_of(states[0]["tables"][0]["embedding"]) == bits_of(frozen[0]["tables"][0]["embedding"])
        assert bits_of(states[5]) != bits_of(frozen[5])


@pytest.mark.parametrize("listed", [False, True])
def test_parameters_that_init_makes_for_what_a_layer_gets(tmp_path, listed):
    """Their shapes follow from microbatches, which a folder does not have."""

    def init(key, carry, mb):
        w = jnp.ones((mb["x"] if carry is None else carry).shape[-1])
        return [w] if listed else {"w": w}

    def scaled(params, carry, mb):
        return (mb["x"] if carry is None else carry) * jax.tree.leaves(params)[0]

    pipe = rrfp.Pipeline(
        [rrfp.layer(scaled, init=init, repeat=2)], lambda x, mb: rrfp.Loss(x.sum(), weight=x.size)
    )
    trainer = rrfp.Trainer(pipe, optax.sgd(0.1), data=[{"x": np.ones((2, 4), np.float32)}])
    trainer.start()
    trainer.save(tmp_path)
    if listed:
        with pytest.raises(rrfp.UsageError, match=r"layer 0 \(scaled\).* take trainer.params\(\)"):
            rrfp.export(tmp_path, pipe=pipe)
        return
    assert jax.tree.map(bits_of, rrfp.export(tmp_path, pipe=pipe)) == jax.tree.map(bits_of, trainer.params())
    assert rrfp.export(tmp_path, pipe=pipe, modules=True)[1](np.ones(4), None).tolist() == [1] * 4
