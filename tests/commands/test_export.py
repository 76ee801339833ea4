"""`rrfp export`: a published model goes through a run and comes out to the bit; what is refused."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  safetensors asks NumPy for its bfloat16
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

import rrfp_jax as rrfp
from models.decoder import Block, DecoderConfig, Embed, Head
from rrfp_jax.weights import architecture, published
from rrfp_jax.weights.families import FAMILIES
from rrfp_jax.weights.published_models import Parameters, as_family, fields_at
from tests.support.commands import export as main

PUBLISHED = Path(__file__).parents[1] / "models" / "published"
TIED = {"0.tokens.embedding": "-1.tokens.embedding"}


def pipeline(cfg):
    layers = [rrfp.layer(kind, cfg) for kind in (Embed, *[Block] * cfg.n_layers, Head)]
    return rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.size), tied=TIED)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that has begun with the tiny Qwen3; its checkpoints lie beside it."""
    cfg = DecoderConfig(**architecture(PUBLISHED / "qwen3"), dtype=jnp.float32)
    data, init = [{"tokens": np.ones((1, 4), np.int32)}], published(PUBLISHED / "qwen3", cfg)
    trainer = rrfp.Trainer(pipeline(cfg), data=data, init=init)
    trainer.start()
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    kept = {name: value for name, value in asdict(cfg).items() if "dtype" not in name}
    trainer.save(f"{folder}.checkpoints", config={"model": kept})
    return folder


def test_what_began_with_it_computes_what_it_does(run):
    cfg = DecoderConfig(**architecture(PUBLISHED / "qwen3"), dtype=jnp.float32)
    carry, expected = None, json.loads((PUBLISHED / "expected.json").read_text())
    for layer in rrfp.export(f"{run}.checkpoints", pipe=pipeline(cfg), modules=True):
        carry = layer(carry, {"tokens": jnp.array(expected["tokens"])})
    np.testing.assert_allclose(np.asarray(carry).ravel(), expected["qwen3"], atol=1e-4)


def tensors(folder):
    found = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: bits(array) for tensors in found for name, array in tensors.items()}


def bits(array):
    return array.dtype.name, array.shape, array.tobytes()


def export(run, to, *flags):
    return main([str(run), f"--to={to}", *flags])


@pytest.mark.parametrize("shard_gb", ["5", "6e-6"], ids=["one file", "several"])
def test_a_published_model_comes_out_to_the_bit(run, tmp_path, capsys, shard_gb):
    there = tmp_path / "out"
    assert export(run, there, "--as=qwen3", "--dtype=bfloat16", f"--shard-gb={shard_gb}") == 0
    assert f"24 tensors, 9,264 bytes, in {there}/" in capsys.readouterr().out
    assert tensors(there) == tensors(PUBLISHED / "qwen3")
    assert architecture(there) == architecture(PUBLISHED / "qwen3")
    ours, theirs = (json.loads((of / "config.json").read_text()) for of in (there, PUBLISHED / "qwen3"))
    same = {"architectures", "model_type", "hidden_act", "head_dim", "tie_word_embeddings", "vocab_size"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert ours["torch_dtype"] == theirs["dtype"] == "bfloat16"
    assert len(list(there.glob("*.safetensors"))) == (1 if shard_gb == "5" else 2)
    assert (there / "model.safetensors.index.json").exists() == (shard_gb != "5")
    published(there, DecoderConfig(**architecture(there)))  # nothing is missing, nothing left over


def test_own_names_give_the_parameters_of_the_run(run, tmp_path):
    assert export(f"{run}.checkpoints", tmp_path / "out", "--step=0") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    states = rrfp.export(f"{run}.checkpoints")
    assert bits(found["1.attention.query.kernel"]) == bits(
        np.asarray(states[1]["attention"]["query"]["kernel"])
    )
    assert len(found) == 2 * 10 + 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_run_in_which_one_stands_has_its_checkpoints_beside_it(run, tmp_path, monkeypatch):
    run.mkdir(exist_ok=True)
    monkeypatch.chdir(run)
    assert main([".", f"--to={tmp_path / 'out'}"]) == 0


def test_nothing_is_written_over(run, tmp_path, capsys):
    there = tmp_path / "out"
    there.mkdir()
    (there / "mine").write_text("kept")
    assert export(run, there) == 2
    assert "is there already; give another folder, or --replace" in capsys.readouterr().err
    assert export(run, there, "--replace") == 0
    assert (tmp_path / "out.1" / "mine").read_text() == "kept"
    assert (there / "model.safetensors").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error: No space left")])
def test_a_disk_that_fails_leaves_nothing(run, tmp_path, capsys, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr("rrfp_jax.weights.tensors.save_file", full)
    assert export(run, tmp_path / "out") == 1
    assert re.search("out: cannot be written: .*No space left", capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--as=llama3"], "no model of llama3 is so: qk_norm=True, not False"),
        (["--as=siglip"], "no model of siglip is so: norm='rms', not 'layer'; gated=True"),
        (["--as=gpt2"], "--as=gpt2: choose one of llama3, "),
        (["--as=qwen3", "--model=model.decoder"], r"no object 'model.decoder' .*--model= \(it has: model\)"),
        (["--as=qwen3", "--first=1"], "lacks 13 parameters of qwen3 with 2 blocks from layer 1 on: 1.tokens"),
        (["--first=1"], "--first= without --as="),
        (["--step=7"], "no checkpoint of step 7 is there; there are: 0"),
        (["--shard-gb=0"], "--shard-gb=0: give a size above 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refusals(run, tmp_path, capsys, flags, said):
    assert export(run, tmp_path / "out", *flags) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]
    assert export(run, tmp_path / "none" / "out") == 2  # in no folder
    assert export(tmp_path, tmp_path / "out") == 2  # of no run


def test_a_config_that_lacks_a_size_is_told_which(tmp_path):
    kept = SimpleNamespace(folder=tmp_path, run=SimpleNamespace(config={"model": {"d_model": 8}}))
    with pytest.raises(rrfp.UsageError, match="has no 'n_layers' in the object 'model' with the sizes"):
        fields_at(kept, "model")


def published_as_stored(name, first, others):
    """The parameters of a published model as those of a checkpoint, with others; and its tensors."""
    family = FAMILIES[name]
    own = load_file(PUBLISHED / name / "model.safetensors")
    prefixes = sorted(family.prefixes, key=len, reverse=True)
    prefix = next(one for one in prefixes if any(key.startswith(one) for key in own))
    table = family.stored(architecture(PUBLISHED / name), first, prefix, False)
    arrays = {path: stored.arrangement.ours(*map(own.get, stored.names)) for path, stored in table.items()}
    keyed = {("params", *path.split(".")): array for path, array in (arrays | others).items()}
    leaves = {key: SimpleNamespace(shape=own.shape, dtype=own.dtype.name) for key, own in keyed.items()}
    return Parameters(SimpleNamespace(folder="there", leaves=leaves, array=keyed.get)), own


def of_parts(name, first):
    """Parameters of a model of which an encoder is a part."""
    others = {f"{first + 3}.out.bias": np.ones(3, np.float32), f"{first + 4}.x": np.ones(1, np.float32)}
    return published_as_stored(name, first, others)


def written(found):
    """The tensors that would be in the files."""
    return {
        tensor: bits(array)
        for source in found.sources
        for tensor, array in zip(source.names, source.read(), strict=True)
    }


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_the_encoder_of_a_model(name):
    params, own = of_parts(name, 2)
    fields = architecture(PUBLISHED / name) | {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    found = as_family(params, FAMILIES[name], 2, fields)
    assert found.left_out == ["5.out.bias", "6.x"]
    pixels = found.others["preprocessor_config.json"]
    assert FAMILIES[name].fields_of(pixels | found.others["config.json"]) == fields
    assert (pixels["size"], pixels["image_std"]) == ({"height": 6, "width": 6}, [0.4, 0.5, 0.6])
    prefix = {"vit": "vit.", "siglip": ""}[name]
    tensors = written(found)
    assert len(tensors) == len(found.sources) + 2 * 2  # keys and values, with biases
    assert tensors == {tensor: bits(own[prefix + tensor]) for tensor in tensors}
    with pytest.raises(rrfp.UsageError, match=r"besides those of .*: 4.x; for a part .* give --first="):
        as_family(of_parts(name, 0)[0], FAMILIES[name], None, fields)


def test_routed_experts_come_out_to_the_bit():
    params, own = published_as_stored("mixtral", 0, {})
    fields = architecture(PUBLISHED / "mixtral")
    found = as_family(params, FAMILIES["mixtral"], None, {**fields, "capacity": 1.25, "balance": 0.02})
    assert written(found) == {name: bits(array) for name, array in own.items()}
    assert FAMILIES["mixtral"].fields_of(found.others["config.json"]) == fields
    assert [*found.others] == ["config.json"] and not found.left_out
