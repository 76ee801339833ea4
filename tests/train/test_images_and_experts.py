"""Encoder and decoder, frozen encoders and routed experts under every kind of hint, against plain JAX."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from configs.mixtral_8x7b import Routed, RoutedBlock
from configs.quickstart import loss
from configs.vision_language import VisionLanguage, layers
from models import decoder, moe, vlm
from tests.support.programs import compilations

SIZES = {"d_model": 8, "n_heads": 2, "n_kv_heads": 2, "head_size": 4, "d_ff": 12, "dtype": jnp.float32}
ENCODER = vlm.EncoderConfig(**SIZES, n_layers=1, patch_size=1, grid=(2, 2), init_scale=0.3)
TEXT = moe.RoutedConfig(
    **SIZES, n_layers=1, vocab_size=12, qk_norm=True, init_scale=0.3, n_experts=4, capacity=0.8, balance=0.3
)
MODEL = vlm.VLMConfig(encoder=ENCODER, decoder=TEXT)
RUN = {"steps": 2, "batch": 2, "microbatches": 4, "seed": 1}
IMAGES = {"images": (1, 3), "text": 6}


class Experts(VisionLanguage):
    """Images before a decoder with routed experts."""

    def pipeline(self):
        return rrfp.Pipeline(layers(self.model, RoutedBlock), loss)


CONFIGS = {
    "images": VisionLanguage(name="images", model=MODEL, **IMAGES, tied=True, **RUN),
    "frozen encoder": VisionLanguage(name="frozen", model=MODEL, **IMAGES, freeze_encoder=True, **RUN),
    "experts": Experts(name="experts", model=replace(MODEL, merge=2), **IMAGES, **RUN),
    "experts alone": Routed(name="routed", model=TEXT, sequence_length=16, **RUN),
    "experts, tied and spread": Routed(
        name="tied", model=TEXT, tied=True, spread_sequences=True, sequence_length=16, **RUN
    ),
}
ONE_CHUNK = "bf", "bfw", "fb", "1f1b", "zb-h1", "zb-h2", "ranked:zb-h2"
TWO_CHUNKS = "zb-v", "bf", "bfw", "ranked:zb-v", "ranked:v-half"


def trainer_of(config, mesh, schedule):
    return rrfp.Trainer(
        config.pipeline(),
        optax.sgd(0.1),
        data=config.train_data(),
        mesh=mesh,
        schedule=schedule,
        settings=rrfp.Settings(equal_schedules=True),
    )


def loaded(source, step):
    return [dict(source.load(mb, list(mb.fields))) for mb in source.plan(step)]


def modules(config):
    """All layers in a row, with parameters of no account."""
    model = config.model
    if isinstance(config, Routed):
        kinds = [(decoder.Embed, model), (RoutedBlock, model), (decoder.Head, model)]
    else:
        block = RoutedBlock if isinstance(config, Experts) else decoder.Block
        kinds = [(vlm.PatchEmbed, model.encoder), (vlm.EncoderBlock, model.encoder), (vlm.Project, model)]
        kinds += [(vlm.Join, model.decoder), (block, model.decoder), (decoder.Head, model.decoder)]
    return [kind(own, rngs=nnx.Rngs(0)) for kind, own in kinds]


def reference(config, params, batch):
    """Mean loss and its gradients by path, one microbatch after the other, in plain JAX."""
    layers = modules(config)
    head, embed = str(len(layers) - 1), "0" if isinstance(config, Routed) else "3"
    weight = sum(fields["mask"].sum() for fields in batch)

    @jax.jit
    @jax.value_and_grad
    def share(params, fields):
        if getattr(config, "tied", False):
            params = params | {head: params[head] | {"tokens": params[embed]["tokens"]}}
        carry, terms = None, 0.0
        for i, layer in enumerate(layers):
            graph, state = nnx.split(layer)
            nnx.replace_by_pure_dict(state, params[str(i)])
            carry = nnx.merge(graph, state)(carry, fields)
            if isinstance(carry, tuple):
                carry, term = carry
                terms += term.total
        nll = optax.softmax_cross_entropy_with_integer_labels(carry, fields["labels"])
        return ((nll * fields["mask"]).sum() + terms) / weight

    found = jax.tree.map(lambda *shares: sum(shares), *(share(params, fields) for fields in batch))
    if getattr(config, "tied", False):
        found[1][head]["tokens"] = found[1][embed]["tokens"]
    return float(found[0]), leaves(found[1])


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.slow(reason="models with images on many meshes")
@pytest.mark.parametrize(
    ("name", "mesh", "schedules"),
    [
        ("images", rrfp.Mesh(pp=2), ONE_CHUNK),
        ("frozen encoder", rrfp.Mesh(pp=2), ONE_CHUNK),
        ("experts", rrfp.Mesh(pp=2), ONE_CHUNK),
        ("experts", rrfp.Mesh(pp=2, chunks=2, shape="v"), TWO_CHUNKS),
        ("experts alone", rrfp.Mesh(pp=2, tp=2), ("bf", "bfw")),
        ("experts, tied and spread", rrfp.Mesh(pp=2, tp=2), ("bf",)),
    ],
    ids=["images", "frozen", "experts", "experts in a V", "experts on two devices", "tied and spread"],
)
def test_hints_give_equal_bits_those_of_plain_jax_but_for_rounding(name, mesh, schedules):
    config = CONFIGS[name]
    trainer, batch = trainer_of(config, mesh, schedules[0]), loaded(config.train_data(), 0)
    trainer.start()
    expected_loss, expected = reference(config, jax.device_get(trainer.stage_params), batch)
    frozen = ("['0']", "['1']", "['2']['norm']") if name == "frozen encoder" else ()
    losses, gradients = [], []
    for schedule in schedules:
        trainer.schedule = schedule
        loss, gradient = jax.device_get(trainer.value_and_grad(batch))
        losses.append(loss)
        gradients.append(leaves(gradient))
    assert losses[0] == pytest.approx(expected_loss, rel=1e-6)
    assert losses == [losses[0]] * len(schedules)
    for found in gradients:
        assert found.keys() == {path for path in expected if not path.startswith(frozen)}
        assert all(np.array_equal(leaf, gradients[0][path]) for path, leaf in found.items())
    for path, leaf in gradients[0].items():
        assert np.abs(leaf - expected[path]).max() <= 1e-5 * np.abs(expected[path]).max(), path


@pytest.mark.slow(reason="10 s: all buckets; models/test_vlm.py has the layers")
def test_nothing_is_compiled_in_steps_of_all_buckets():
    config = CONFIGS["experts"]
    trainer = trainer_of(config, rrfp.Mesh(pp=2), "bfw")
    trainer.start()
    with compilations() as compiled:
        reports = list(trainer.steps(3))
    images = {mb.source[-1] for step in range(3) for mb in config.train_data().plan(step)}
    assert images == {1, 3}
    assert compiled == []
    assert 0 < reports[-1].metrics["dropped"] < 0.5
    assert reports[-1].metrics["balance"] > 0.3
