"""Documents of very different lengths: cut into a few lengths (buckets), each compiled once, mixed in a step.

Start it with `python lengths.py`, or with one process per stage: `rrfp launch -n 2 lengths.py`.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp


class Embed(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(256, 64, rngs=rngs)

    def __call__(self, carry, mb):
        return self.tokens(mb["tokens"])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x, mb):
        here = self.norm(x)
        before = jnp.pad(here, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return x + self.down(nnx.gelu(self.up(jnp.concatenate([here, before], axis=-1))))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, x, mb):
        return self.out(x)


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss((nll * mb["mask"]).sum(), weight=mb["mask"].sum())  # the mask is 0 for padding


random = np.random.default_rng(0)
counts = np.clip(random.lognormal(2.5, 0.8, 2000), 3, 40).astype(int)  # many are short, a few are long
texts = [" ".join(map(str, range(n % 40, n % 40 + count))) for n, count in enumerate(counts)]
corpus = rrfp.data.Corpus(
    source=rrfp.data.Examples(texts, field=""), tokenizer=rrfp.data.Bytes(), vocabulary=256, end=0
)


def documents(buckets):
    fit = rrfp.data.Fit(buckets=buckets, longest=128)
    return rrfp.data.Documents(corpus=corpus, lengths=fit, tokens=512, microbatches=8)


data = documents(buckets=3)
layers = [rrfp.layer(Embed), rrfp.layer(Block, repeat=2), rrfp.layer(Head)]
trainer = rrfp.Trainer(
    rrfp.Pipeline(layers, loss), optax.adam(3e-3), data=data, mesh=rrfp.Mesh(pp=2), clip_norm=1.0
)
if trainer.is_main:
    print(f"lengths {data.bucket_lengths}: {data.padding:.0%} of the tokens are padding")
    print(f"with a single length: {documents(buckets=1).padding:.0%}")
    for step in range(3):
        print(f"step {step} has", *("x".join(map(str, mb.fields["tokens"].shape)) for mb in data.plan(step)))
for report in trainer.steps(20):
    if trainer.is_main and report.step % 5 == 4:
        print(report)
