"""A perceptron of haliax: arrays with named axes."""

import haliax as hax
import haliax.nn as hnn
import numpy as np

import rrfp_jax as rrfp
from tests.other_models.frameworks import equinox_whole
from tests.other_models.held import ROWS, Model, cross_entropy, held

BATCH, SEEN, CLASSES = hax.Axis("batch", ROWS), hax.Axis("seen", 7), hax.Axis("classes", 5)


def perceptron(dropout):
    def make(key):
        return hnn.MLP.init(SEEN, CLASSES, 16, depth=4, key=key)

    def data(random):
        return {
            "x": random.standard_normal((ROWS, 7)).astype(np.float32),
            "labels": random.integers(0, 5, ROWS),
        }

    def seen(mb):
        return hax.named(mb["x"], ("batch", "seen"))

    whole = equinox_whole(
        make, lambda m, mb: m(seen(mb)).rearrange(("batch", "classes")).array, lambda m: m.layers
    )
    layers = [
        rrfp.layer(make=lambda key: make(key).layers[0], call=lambda m, _, mb: hnn.relu(m(seen(mb)))),
        *[
            rrfp.layer(make=lambda key, i=i: make(key).layers[i], call=lambda m, x, mb: hnn.relu(m(x)))
            for i in range(1, 4)
        ],
        rrfp.layer(
            make=lambda key: make(key).layers[4],
            call=lambda m, x, mb: m(x).rearrange(("batch", "classes")).array,
        ),
    ]
    return Model(whole=whole, layers=layers, data=data, loss=cross_entropy)


test_steps, test_evaluation = held([perceptron], package="haliax", framework="haliax")
