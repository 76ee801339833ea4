"""Twenty small models, each with a step's data: written by hand, of `models/`, and drawn at random."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from configs import decoders, mixtral_8x7b, quickstart, sharded, vision_language
from models import decoder, gpt, moe, vlm
from tests.odd_models import grammar
from tests.support import toy, zoo

SIZES = {"d_model": 8, "n_heads": 2, "n_kv_heads": 1, "head_size": 4, "d_ff": 12, "dtype": jnp.float32}
TEXT = {**SIZES, "n_layers": 4, "vocab_size": 12, "init_scale": 0.3}
RUN = {"steps": 2, "microbatches": 4, "seed": 1}


def embed_init(key):
    return {"table": jax.random.normal(key, (toy.VOCABULARY, toy.WIDTH))}


def block_init(key):
    a, b = jax.random.split(key)
    return {
        "up": jax.random.normal(a, (toy.WIDTH, 2 * toy.WIDTH)) / toy.WIDTH**0.5,
        "down": jax.random.normal(b, (2 * toy.WIDTH, toy.WIDTH)) / toy.WIDTH**0.5,
        "bias": jnp.zeros(toy.WIDTH),
    }


def head_init(key):
    return {"out": jax.random.normal(key, (toy.WIDTH, toy.VOCABULARY)) / toy.WIDTH**0.5}


INITS = embed_init, block_init, head_init
"""The toy's initial values of older commits, to which goldens are compared."""


def loss(logits, mb):
    """The toy's of older commits."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    hits = ((logits.argmax(-1) == mb["labels"]) * mb["mask"]).sum()
    return rrfp.Loss((nll * mb["mask"]).sum(), weight=mb["mask"].sum(), metrics={"accuracy": hits})


@dataclasses.dataclass(frozen=True)
class Model:
    """A pipeline, and `data(step)` or another `Data`."""

    pipe: object
    data: object
    optimizer: object = dataclasses.field(default_factory=lambda: optax.adamw(1e-2))


def batches(step):
    return toy.microbatches(4, seed=step)


def tokens(vocabulary=12, shape=(2, 8)):
    return decoders.RandomTokens(vocabulary, shape, 4, 0)


def of_config(config):
    return Model(config.pipeline(), config.train_data())


def text(kind=decoders.Decoder, model=decoder.DecoderConfig, **given):
    """A decoder on random tokens; `given` are fields of its model."""
    run = {name: given.pop(name) for name in ("tied",) if name in given}
    config = kind(name="golden", model=model(**{**TEXT, **given}), sequence_length=8, batch=2, **RUN, **run)
    return of_config(config)


def experts(**given):
    return text(mixtral_8x7b.Routed, moe.RoutedConfig, n_experts=4, capacity=0.8, balance=0.3, **given)


def images(**given):
    encoder = vlm.EncoderConfig(**SIZES, n_layers=1, patch_size=1, grid=(2, 2), init_scale=0.3)
    model = vlm.VLMConfig(encoder=encoder, decoder=decoder.DecoderConfig(**TEXT))
    kind = vision_language.VisionLanguage
    return of_config(kind(name="golden", model=model, images=(1, 3), text=6, batch=2, **RUN, **given))


def small_gpt(**given):
    cfg = gpt.GPTConfig(d_model=8, n_heads=2, d_ff=16, n_layers=4, vocab_size=12, **given)
    return Model(quickstart.pipeline(cfg), tokens())


def dropped_block(params, carry, mb):
    """The toy's block with dropout, by the key of the layer's place in the step."""
    new = toy.block(params, carry, mb)
    keep = jax.random.bernoulli(mb.key, 0.9, new["x"].shape)
    return {**new, "x": jnp.where(keep, new["x"] / 0.9, 0.0)}


def dropout():
    first, *_, last = toy.layers(INITS)
    block = rrfp.layer(dropped_block, init=block_init, repeat=toy.BLOCKS)
    return Model(rrfp.Pipeline([first, block, last], loss), batches)


def halved_block(params, carry, mb):
    """The toy's block in bfloat16."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    new = toy.block(half, {**carry, "x": carry["x"].astype(jnp.bfloat16)}, mb)
    return {**new, "x": new["x"].astype(jnp.float32)}


def half():
    first, *_, last = toy.layers(INITS)
    block = rrfp.layer(halved_block, init=block_init, repeat=toy.BLOCKS)
    return Model(rrfp.Pipeline([first, block, last], loss), batches)


def drawn(number):
    """A model of the odd models' grammar."""
    case = grammar.model(number)
    return Model(case.pipeline(), [dict(fields) for fields in case.batch], optax.sgd(0.1))


def several_shapes(step):
    """Microbatches of two buckets."""
    return [*toy.microbatches(2, seed=step), *toy.microbatches(2, seed=step + 100, length=5)]


MODELS = {
    "toy": lambda: Model(toy.pipeline(loss, INITS), batches),
    "two buckets": lambda: Model(toy.pipeline(loss, INITS), several_shapes),
    "tied": lambda: Model(toy.tied_pipeline(INITS, loss), batches),
    "frozen": lambda: Model(toy.pipeline(loss, INITS, frozen=("0.*", "2.up")), batches),
    "dropout": dropout,
    "bfloat16": half,
    "zoo": lambda: Model(zoo.pipeline(), lambda step: list(zoo.microbatches(step))),
    "zoo, frozen and tied": lambda: Model(
        zoo.pipeline(**zoo.FROZEN_AND_TIED), lambda step: list(zoo.microbatches(step))
    ),
    "gpt": small_gpt,
    "gpt, bfloat16": functools.partial(small_gpt, dtype=jnp.bfloat16),
    "decoder": text,
    "decoder, tied": functools.partial(text, tied=True),
    "decoder, qk-norm": functools.partial(text, qk_norm=True),
    "experts": experts,
    "images": images,
    "images, frozen encoder": functools.partial(images, freeze_encoder=True),
    **{f"drawn {number}": functools.partial(drawn, number) for number in (2, 4, 9, 12)},
}


def spread():
    """The toy, whose stages of two devices share its tensors."""
    split = {"*.up": sharded.P(None, "tp"), "*.down": sharded.P("tp", None), "-1.out": sharded.P("tp", None)}
    return Model(toy.pipeline(loss, INITS, sharding=split), batches)


def digest(trainer):
    """A hash of all parameters."""
    return zoo.digest(jax.tree.map(np.asarray, trainer.params()))[:16]
