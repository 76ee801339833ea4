"""Tells three clouds of points apart with Linen layers on two stages."""

import flax.linen as nn
import numpy as np
import optax

import rrfp_jax as rrfp


class Dense(nn.Module):
    size: int
    last: bool = False

    @nn.compact
    def __call__(self, x, mb):
        x = nn.Dense(self.size)(mb["points"] if x is None else x)
        return x if self.last else nn.relu(x)


CENTRES = np.array([[0, 3], [3, -3], [-3, -3]])


def clouds(step, microbatches=4, rows=32):
    random = np.random.default_rng(step)
    for _ in range(microbatches):
        label = random.integers(0, 3, rows)
        points = CENTRES[label] + random.standard_normal((rows, 2))
        yield {"points": points, "label": label}


def cross_entropy(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["label"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


layers = [rrfp.layer(Dense, 32, repeat=3), rrfp.layer(Dense, 3, last=True)]
pipe = rrfp.Pipeline(layers, cross_entropy)
trainer = rrfp.Trainer(pipe, optax.sgd(0.05, momentum=0.9), data=clouds, mesh=rrfp.Mesh(pp=2))
losses = [report.loss for report in trainer.steps(10)]
assert losses[-1] < 0.5 * losses[0], losses
