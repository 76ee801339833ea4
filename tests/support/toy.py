"""A small model written twice: as layers for the pipeline, and by hand in plain JAX as the reference."""

import inspect
import math
import os
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from rrfp_jax.runtime.model.sharding import Sharding

OWN = inspect.signature(rrfp.Trainer).parameters.keys()
OTHERS = {item.name for item in fields(rrfp.Settings)} - OWN


def made(pipe, optimizer=None, **given):
    """A Trainer; what is no argument of its own goes into `settings`."""
    others = {name: given.pop(name) for name in OTHERS & given.keys()}
    return rrfp.Trainer(pipe, optimizer, **given, **({"settings": rrfp.Settings(**others)} if others else {}))


VOCABULARY, WIDTH, BLOCKS = 13, 16, 6


def numbers(key, shape):
    """Of variance 1, from a hash of key and index: `jax.random` takes a fifth of what a Trainer compiles."""
    first, second = jax.random.key_data(key)
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) + (first ^ second)
    for factor in (2246822507, 3266489909):
        bits = (bits ^ bits >> 15) * jnp.uint32(factor)
    return ((bits >> 8).astype(jnp.float32) * 2.0**-24 - 0.5).reshape(shape) * 12**0.5


def embed_init(key):
    return {"table": numbers(key, (VOCABULARY, WIDTH))}


def embed(params, carry, mb):
    return {"x": params["table"][mb["tokens"]], "positions": jnp.arange(mb["tokens"].shape[1])}


def block_init(key):
    up, down = numbers(key, (2, WIDTH, 2 * WIDTH)) / WIDTH**0.5
    return {
        "up": up,
        "down": down.T,
        "bias": jnp.zeros(WIDTH),
    }


def block(params, carry, mb):
    x = carry["x"] + 0.01 * carry["positions"][:, None]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]
    return {"x": x, "positions": carry["positions"]}


def head_init(key):
    return {"out": numbers(key, (WIDTH, VOCABULARY)) / WIDTH**0.5}


def head(params, carry, mb):
    return carry["x"] @ params["out"]


def tied_head(params, carry, mb):
    return carry["x"] @ params["table"].T


def sums(logits, mb):
    """Cross-entropy in a third of the operations of optax's, as every Trainer compiles it several times."""
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    chosen = jnp.arange(logits.shape[-1]) == mb["labels"][..., None]
    nll = jnp.log(jnp.exp(shifted).sum(-1)) - (shifted * chosen).sum(-1)
    return (nll * mb["mask"]).sum(), mb["mask"].sum()


def loss(logits, mb):
    total, weight = sums(logits, mb)
    hits = ((logits.argmax(-1) == mb["labels"]) * mb["mask"]).sum()
    return rrfp.Loss(total, weight=weight, metrics={"accuracy": hits})


INITS = embed_init, block_init, head_init


def layers(inits=INITS):
    first, middle, last = inits
    return [
        rrfp.layer(embed, init=first),
        rrfp.layer(block, init=middle, repeat=BLOCKS),
        rrfp.layer(head, init=last),
    ]


def pipeline(loss=loss, inits=INITS, **kwargs):
    return rrfp.Pipeline(layers(inits), loss, **kwargs)


def tied_pipeline(inits=INITS, loss=loss, **kwargs):
    """Its head is the embedding's table, on another stage; the head's own initial value must not count."""
    *others, _ = layers(inits)
    last = rrfp.layer(tied_head, init=lambda key: {"table": jnp.zeros((VOCABULARY, WIDTH))})
    return rrfp.Pipeline([*others, last], loss, tied={"0.table": "-1.table"}, **kwargs)


def microbatches(count=5, seed=0, rows=2, length=8):
    """Microbatches whose numbers of unmasked tokens differ widely."""
    random = np.random.default_rng(seed)
    out = []
    for j in range(count):
        tokens = random.integers(0, VOCABULARY, (rows, length + 1))
        mask = random.random((rows, length)) < (j + 1) / (count + 1)
        mask[0, 0] = True
        out.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask.astype(np.float32)})
    return out


def reference(params, batch):
    """Loss and gradient of one unpipelined `jax.value_and_grad` over the whole, concatenated batch."""
    whole = {name: np.concatenate([np.asarray(mb[name]) for mb in batch]) for name in batch[0]}
    return _value_and_grad(jax.device_put(params, jax.local_devices()[0]), whole)


@jax.jit
@jax.value_and_grad
def _value_and_grad(params, whole):
    carry = embed(params["0"], None, whole)
    for i in range(1, BLOCKS + 1):
        carry = block(params[str(i)], carry, whole)
    total, weight = sums(head(params[str(BLOCKS + 1)], carry, whole), whole)
    return total / weight


def initial_params(trainer):
    """Those of all layers, made by this process itself, whichever stages it has."""
    engine = trainer._engine
    return engine.staging.initial(engine.alone, Sharding()).of(range(len(engine.pipe)))


def worst_leaf(gradient, expected):
    """The largest max|g - reference| / max|reference| over all leaves."""
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(g) - e).max() / np.abs(np.asarray(e)).max()) for g, e in pairs)


def trainer(stages=4, **kwargs):
    """Programs are kept for other processes where RRFP_TEST_EXECUTABLES says."""
    kwargs.setdefault("executables", os.environ.get("RRFP_TEST_EXECUTABLES"))
    kwargs.setdefault("data", lambda step: microbatches(seed=step))
    kwargs.setdefault("mesh", rrfp.Mesh(pp=stages))
    optimizer = kwargs.pop("optimizer", optax.adamw(1e-2))
    return made(kwargs.pop("pipe", None) or pipeline(), optimizer, **kwargs)


def refuse_bytes(monkeypatch, own, split):
    """Have bytes of stage 1 not suffice on that split of a Trainer, as only the programs there can tell."""
    memory = type(own._engine.memory)
    of_step = memory.of_step

    def too_little(self, *step):
        if own.split == split:
            raise rrfp.UsageError("activation_budget=auto: stage 1 has too little")
        return of_step(self, *step)

    monkeypatch.setattr(memory, "of_step", too_little)


def arrays(trainer):
    """Parameters and the optimizer's states that a process has."""
    states = [leaf for own in trainer._engine.optimizers for leaf in jax.tree.leaves(own.tree)]
    return [*jax.tree.leaves(trainer.stage_params), *states]
