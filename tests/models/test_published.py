"""Tiny published models: our layers compute what the models' own code does (`published/make.py`)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import rrfp_jax as rrfp
from models import moe
from models.decoder import Block, DecoderConfig, Embed, Head
from models.generate import greedy, logits_of
from models.moe import RoutedConfig
from models.vlm import EncoderBlock, EncoderConfig, PatchEmbed, Project, VLMConfig
from rrfp_jax.runtime.model.roles import leaf_path
from rrfp_jax.weights import architecture, published, together

FOLDER = Path(__file__).parent / "published"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
TOKENS = jnp.array(EXPECTED["tokens"], jnp.int32)
LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_1 |= {"rope_type": "llama3", "original_max_position_embeddings": 16}


def config_of(folder):
    fields = architecture(folder)
    kind = (
        EncoderConfig
        if "vocab_size" not in fields
        else RoutedConfig
        if "n_experts" in fields
        else DecoderConfig
    )
    return kind(**fields, dtype=jnp.float32)


def filled(init, layers):
    """Modules of these classes and configs with parameters from `init`."""
    return [fill(init, number, kind(cfg, rngs=nnx.Rngs(0))) for number, (kind, cfg) in enumerate(layers)]


def fill(init, number, module):
    def given(path, own):
        found = init(leaf_path(number, path), jax.ShapeDtypeStruct(own.shape, own.dtype))
        return own if found is None else jnp.asarray(found)

    nnx.update(module, jax.tree_util.tree_map_with_path(given, nnx.as_pure(nnx.state(module))))
    return module


def decoder(cfg):
    block = moe.Block if isinstance(cfg, RoutedConfig) else Block
    return [(Embed, cfg), *[(block, cfg)] * cfg.n_layers, (Head, cfg)]


def logits(folder, cfg):
    return np.asarray(logits_of(filled(published(folder, cfg), decoder(cfg)), TOKENS)).ravel()


@pytest.fixture
def folder(tmp_path):
    """A function: a model's folder, copied, with other entries of its `config.json`."""

    def copied(name, **entries):
        shutil.copytree(FOLDER / name, tmp_path / name)
        file = tmp_path / name / "config.json"
        config = {**json.loads(file.read_text()), **entries}
        file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
        return tmp_path / name

    return copied


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral"])
def test_logits_of_decoders(name):
    np.testing.assert_allclose(logits(FOLDER / name, config_of(FOLDER / name)), EXPECTED[name], atol=1e-4)


def test_greedy_completions():
    cfg = config_of(FOLDER / "qwen3")
    completed = greedy(filled(published(FOLDER / "qwen3", cfg), decoder(cfg)), TOKENS, 6)
    assert completed[:, TOKENS.shape[1] :].tolist() == EXPECTED["qwen3.greedy"]


@pytest.mark.parametrize("form", ["of transformers 5", "of older files"])
def test_logits_with_the_stretched_positions_of_llama_3_1(folder, form):
    new = {"rope_parameters": {**LLAMA_3_1, "rope_theta": 500_000.0}}
    old = {"rope_parameters": "absent", "rope_theta": 500_000.0, "rope_scaling": LLAMA_3_1}
    there = folder("llama3", **(new if form == "of transformers 5" else old))
    found = logits(there, config_of(there))
    np.testing.assert_allclose(found, EXPECTED["llama3.1"], atol=1e-4)
    assert abs(found - EXPECTED["llama3"]).max() > 0.1


def encoded(name):
    """What the norm after the last block of an encoder gives of the image; float32[P, D]."""
    cfg = config_of(FOLDER / name)
    vlm = VLMConfig(encoder=cfg, decoder=config_of(FOLDER / "llama3"))
    layers = [(PatchEmbed, cfg), *[(EncoderBlock, cfg)] * cfg.n_layers, (Project, vlm)]
    init = published(FOLDER / name, cfg)
    image = np.array(EXPECTED["image"], np.uint8).reshape(3, 2, 3, 2, 3)  # rows of patches, rows in them, ...
    patches, places = image.swapaxes(1, 2).reshape(9, 12), np.indices((3, 3)).reshape(2, 9).T
    if cfg.class_token:
        patches, places = np.concatenate([0 * patches[:1], patches]), np.concatenate([[[-1, -1]], places])
    mb = {"patches": patches[None], "patch_places": places[None], "images": np.ones((1, len(places)), int)}
    carry = None
    *first, project = filled(init, layers)
    for layer in first:
        carry = layer(carry, jax.tree.map(jnp.asarray, mb))
    return np.asarray(project.norm(carry))[0]


@pytest.mark.slow(reason="2 s: a model of its own; test_classes_of_vit has images")
def test_features_of_siglip():
    np.testing.assert_allclose(encoded("siglip").ravel(), EXPECTED["siglip"], atol=1e-4)


def test_classes_of_vit():
    """Its classifier, which our layers have no use for, reads the class token."""
    own = load_file(FOLDER / "vit" / "model.safetensors")
    matrix, bias = (own[f"classifier.{name}"].astype(np.float32) for name in ("weight", "bias"))
    np.testing.assert_allclose(matrix @ encoded("vit")[0] + bias, EXPECTED["vit"], atol=1e-4)


def test_a_layer_reads_its_own_tensors_only(monkeypatch):
    import rrfp_jax.weights.tensors as reading

    read, own = [], reading._read
    monkeypatch.setattr(reading, "_read", lambda path, name: read.append(name) or own(path, name))
    cfg = config_of(FOLDER / "llama3")
    init = published(FOLDER / "llama3", cfg, first=5)
    assert not read
    fill(init, 7, Block(cfg, rngs=nnx.Rngs(0)))
    assert len(read) == 9 and all(name.startswith("model.layers.1.") for name in read)
    assert init("4.mlp.up.kernel", jax.ShapeDtypeStruct((16, 20), jnp.float32)) is None


def pipeline(cfg, **kwargs):
    layers = [rrfp.layer(kind, of) for kind, of in decoder(cfg)]
    return rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.size), **kwargs)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda cfg: pipeline(cfg, tied={"0.tokens.embedding": "-1.tokens.embedding"}), "ties 0.tokens.embe"),
        (
            lambda cfg: pipeline(replace(cfg, n_layers=3)),
            r"lacks 2 parameters .* 3.norm.scale; .*layers are 0 to 3",
        ),
        (lambda cfg: pipeline(replace(cfg, n_layers=1)), "pipeline lacks 10 parameters .* 2.attention"),
    ],
    ids=["tied", "more layers", "fewer layers"],
)
def test_a_pipeline_that_is_another_model(make, said):
    cfg = config_of(FOLDER / "llama3")
    init = together(published(FOLDER / "llama3", cfg))
    with pytest.raises(rrfp.UsageError, match=said):
        data = [{"tokens": np.asarray(TOKENS)}]
        rrfp.Trainer(make(cfg), data=data, init=init)


class TestRefusals:
    @pytest.mark.parametrize(
        ("entries", "said"),
        [
            ({"hidden_size": 32}, "config.json: d_model=16, not 32"),
            ({"tie_word_embeddings": True}, None),
            ({"model_type": "gpt2"}, "model_type='gpt2': known are 'llama', 'qwen3'"),
            ({"hidden_act": "relu"}, "hidden_act='relu': of llama3 only hidden_act='silu'"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "type 'yarn': only 'llama3' is computed"),
            ({"rope_parameters": ["yarn"]}, r"rope_parameters=\['yarn'\]: is no object"),
            ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5: is no whole number"),
            ({"hidden_size": 1e400}, "hidden_size=inf: is no number"),
            ({"rms_norm_eps": "absent"}, "rms_norm_eps is not there"),
            ({"vocab_size": "many"}, "vocab_size='many': is no number"),
            ({"quantization_config": {"bits": 4}}, "are quantized"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_another_config(self, folder, entries, said):
        there = folder("llama3", **entries)
        cfg = config_of(FOLDER / "llama3")
        if said is None:  # the head's tensor may be there although it is the embedding
            assert published(there, cfg).stored["3.tokens.embedding"].names == ("model.embed_tokens.weight",)
            return
        with pytest.raises(rrfp.UsageError, match=said):
            published(there, cfg)

    def test_a_file_that_was_not_downloaded(self, folder):
        there = folder("llama3")
        (there / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(rrfp.UsageError, match=r"1 of its 2 files are not there, such as model-00002"):
            published(there, config_of(there))

    def test_tensors_missing_or_left_over(self, folder):
        there = folder("qwen3")
        cfg, file = config_of(there), there / "model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "model.layers.0.adapter": np.ones(1)}, file)
        with pytest.raises(rrfp.UsageError, match=r"besides .* 1 tensors: model.layers.0.adapter"):
            published(there, cfg)
        save_file({name: own for name, own in tensors.items() if name != "model.norm.weight"}, file)
        with pytest.raises(rrfp.UsageError, match=r"lacks 1 tensors: model.norm.weight"):
            published(there, cfg)

    def test_only_the_buffers_of_old_llamas_are_let_go(self, folder):
        """LLaMA 2's files have the wavelengths of rotary positions, which follow from the config."""
        there = folder("llama3")
        file = there / "model-00002-of-00002.safetensors"
        blocks = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2) for i in range(3)}
        *own, foreign = blocks
        save_file({**load_file(file), **{name: blocks[name] for name in own}}, file)
        published(there, config_of(there))
        save_file({**load_file(file), foreign: blocks[foreign]}, file)
        with pytest.raises(rrfp.UsageError, match=f"besides .* 1 tensors: {foreign}"):
            published(there, config_of(there))

    def test_images_that_are_normalised_otherwise(self, folder):
        there = folder("vit")
        file = there / "preprocessor_config.json"
        file.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}))
        assert config_of(there).std == (0.4, 0.5, 0.6)
        for wrong, said in (
            ({"do_rescale": False}, "do_rescale=False"),
            ({"image_std": [0, 1, 1]}, "image_std=0"),
        ):
            file.write_text(json.dumps(wrong))
            with pytest.raises(rrfp.UsageError, match=said):
                config_of(there)

    def test_no_folder_of_a_model(self, tmp_path):
        with pytest.raises(rrfp.UsageError, match=r"config.json .*No such file"):
            architecture(tmp_path)
        with pytest.raises(rrfp.UsageError, match="give functions"):
            together("llama3/")
