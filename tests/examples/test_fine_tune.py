"""LoRA on published weights: only adapters are trained and kept, as plain JAX does it; merging is exact."""

import json
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import rrfp_jax as rrfp
from examples import fine_tune
from models import decoder
from tests.examples.test_examples import EXAMPLES, losses, run

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "tiny-llama"
    fine_tune.make(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base):
    """A trainer after some steps, the states that it began with, its losses and the bytes that it holds."""
    cfg, init = fine_tune.read(base)
    trainer = rrfp.Trainer(
        fine_tune.pipeline(cfg), optax.adam(1e-2), data=fine_tune.data, mesh=rrfp.Mesh(pp=2), init=init
    )
    ledgers = trainer.start()
    first = trainer.params()
    return trainer, first, [report.loss for report in trainer.steps(STEPS)], ledgers


def plain(cfg, states):
    """The layers as plain flax, with the values of these states."""
    kinds = [fine_tune.Embed, *[fine_tune.Block] * cfg["num_hidden_layers"], fine_tune.Head]
    layers = [nnx.eval_shape(lambda kind=kind: kind(cfg, nnx.Rngs(7))) for kind in kinds]
    for layer, state in zip(layers, states, strict=True):
        nnx.update(layer, state)
    return layers


def logits_of(layers, mb):
    carry = None
    for layer in layers:
        carry = layer(carry, mb)
    return carry


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_bias": True}, "cannot compute models with attention_bias"),
        ({"model_type": "qwen3"}, "LLaMA models, not qwen3"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "positions of the type llama3"),
    ],
)
def test_another_model_is_refused(given, said, base, tmp_path):
    cfg = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(cfg | given))
    with pytest.raises(SystemExit, match=said):
        fine_tune.read(tmp_path)


@pytest.mark.parametrize(
    "given",
    [{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}, {}],
    ids=["transformers 5", "transformers 4", "neither"],
)
def test_wavelengths_of_positions_are_those_that_weights_reads(given, base, tmp_path):
    config = json.loads((base / "config.json").read_text()) | given
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(base / "model.safetensors", tmp_path)
    cfg, _ = fine_tune.read(tmp_path)
    assert cfg == config, "what is written with merged weights"
    block = nnx.eval_shape(lambda: fine_tune.Block(cfg, nnx.Rngs(0)))
    assert block.theta == rrfp.weights.architecture(tmp_path)["rope_base"] == (5e5 if given else 1e4)


@pytest.mark.slow(reason="3 s; models/test_published.py has such models")
def test_the_model_is_that_of_the_published_weights(base):
    """As another implementation of it reads them."""
    cfg = decoder.DecoderConfig(**rrfp.weights.architecture(base), dtype=jnp.float32)
    layers = [
        *(rrfp.layer(decoder.Embed, cfg), rrfp.layer(decoder.Block, cfg, repeat=cfg.n_layers)),
        rrfp.layer(decoder.Head, cfg),
    ]
    mb = rrfp.EvaluationBatch({"tokens": fine_tune.data(0)[0]["tokens"]})
    found = []
    for pipe, init in (
        (rrfp.Pipeline(layers, fine_tune.loss), rrfp.weights.published(base, cfg)),
        (fine_tune.pipeline(fine_tune.read(base)[0]), fine_tune.read(base)[1]),
    ):
        trainer = rrfp.Trainer(pipe, data=fine_tune.data, init=init)
        trainer.start()
        found.append(np.asarray(logits_of(trainer.params(modules=True), mb)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.costly(reason="a Trainer and plain JAX, which compile for themselves")
def test_it_trains_as_plain_jax_does(base, tuned):
    trainer, first, found, _ = tuned
    cfg, _ = fine_tune.read(base)
    graph, trained, rest = nnx.split(plain(cfg, first), lambda path, leaf: path[-1] in "ab", ...)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(trained)

    def loss_of(trained, batch):
        logits = logits_of(nnx.merge(graph, trained, rest), batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    step_of, wanted = jax.jit(jax.value_and_grad(loss_of)), []
    for step in range(STEPS):
        parts = fine_tune.data(step)
        loss, gradient = step_of(
            trained, {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        )
        update, state = optimizer.update(gradient, state)
        trained = optax.apply_updates(trained, update)
        wanted.append(float(loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    adapters = fine_tune.adapters_of(trainer.params())
    assert len(adapters) == 2 * 7 * cfg["num_hidden_layers"]
    for name, own in adapters.items():
        layer, part, key = name.split(".")
        np.testing.assert_allclose(own, trained[int(layer)][part][key][...], rtol=1e-3, atol=1e-5)


def test_the_optimizer_holds_the_adapters_only(tuned):
    trainer, _, _, ledgers = tuned
    size = sum(own.nbytes for own in fine_tune.adapters_of(trainer.params()).values())
    counts = 4 * len(ledgers)  # Adam's number of steps, on each stage
    assert sum(own.optimizer_bytes for own in ledgers) == 2 * size + counts
    assert sum(own.accumulator_bytes for own in ledgers) == size


@pytest.mark.slow(reason="2 s: a Trainer; the test above has the training")
def test_the_base_is_as_it_was_and_merging_is_exact(base, tuned, tmp_path):
    trainer, first, _, _ = tuned
    cfg, _ = fine_tune.read(base)
    published, states = load_file(base / "model.safetensors"), trainer.params()
    adapters = fine_tune.adapters_of(states)
    fine_tune.write(tmp_path / "merged", cfg, fine_tune.merged(base, cfg, adapters))
    again, init = fine_tune.read(tmp_path / "merged")
    assert again == cfg
    other = rrfp.Trainer(fine_tune.pipeline(cfg), data=fine_tune.data, init=init)
    other.start()
    merged = other.params()
    for layer in range(1, cfg["num_hidden_layers"] + 1):
        for part, own in states[layer].items():
            if "a" in own:
                stored = published[fine_tune.published_name(f"{layer}.{part}.base.kernel", cfg)]
                before = np.asarray(own["base"]["kernel"][...])
                assert np.array_equal(before, stored.T)
                added = before + adapters[f"{layer}.{part}.a"] @ adapters[f"{layer}.{part}.b"]
                assert np.array_equal(np.asarray(merged[layer][part]["base"]["kernel"][...]), added)
            else:
                assert np.array_equal(own["scale"][...], first[layer][part]["scale"][...])
    mb = rrfp.EvaluationBatch({"tokens": fine_tune.data(0)[0]["tokens"]})
    with_adapters = np.asarray(logits_of(plain(cfg, states), mb))
    assert np.array_equal(with_adapters, np.asarray(logits_of(trainer.params(modules=True), mb)))
    np.testing.assert_allclose(logits_of(plain(cfg, merged), mb), with_adapters, rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason="a process that compiles for itself")
@pytest.mark.parametrize(
    ("start", "others"),
    [(("fine_tune.py",), 14), (("-m", "rrfp_jax", "launch", "-n", "2", "fine_tune.py"), 7)],
)
def test_the_script_resumes_and_refuses_another_base(start, others, tmp_path):
    """It says how many values of the base are others where it runs: of two processes, each has half."""
    shutil.copy(EXAMPLES / "fine_tune.py", tmp_path)
    said = run(sys.executable, *start, folder=tmp_path)
    assert re.search(r"checkpoints leave out \d+ frozen parameters, such as 0\.tokens\.embedding", said)
    assert losses(said)[19] < 0.1 and "optimizer" not in said.splitlines()[0]
    kept = {path.name for path in (tmp_path / "lora.checkpoints" / "20").iterdir() if path.is_dir()}
    assert kept and {name[-2:] for name in kept - {"optimizer.0.count"}} == {".a", ".b"}
    assert list(losses(run(sys.executable, *start, folder=tmp_path))) == [24, 29, 34, 39]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "llama"
    (tmp_path / "merged").rename(tmp_path / "other")
    said = rf"has other values of {others} of them, such as 1\.down\.base\.kernel"
    with pytest.raises(AssertionError, match=said):
        run(sys.executable, *start, "other", folder=tmp_path)
