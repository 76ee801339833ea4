"""A model that somebody else wrote, held against itself: whole in plain JAX, and cut into stages."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import packages_distributions, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import rrfp_jax as rrfp

STEPS, MICROBATCHES, ROWS = 3, 3, 2
TOLERANCE = 2e-5
DROPOUT = 0.3


class Batch(dict):
    """Fields by name, as a loop without a pipeline has them; with a random key, and whether one trains."""

    def __init__(self, fields, key, training):
        super().__init__(fields)
        self.key, self.training = key, training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """The author's model in one piece.

    Attributes:
        params: a pytree of arrays, all that is trained.
        output: `output(params, batch)` is what the loss takes, as the author computes it.
        parts: `parts(params)` are the same arrays, a tree for each layer of the pipeline.
    """

    params: Any
    output: Callable[..., Any]
    parts: Callable[[Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model whole and as layers, and what it learns: data and loss are the same for both.

    Attributes:
        drops: whether it has dropout.
    """

    whole: Whole
    layers: Sequence[Any]
    data: Callable[[np.random.Generator], Mapping[str, Any]]
    loss: Callable[[Any, Any], rrfp.Loss]
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drops: bool = False

    def batch(self, step):
        """The microbatches of a step."""
        return [self.data(np.random.default_rng([step, number])) for number in range(MICROBATCHES)]

    def aliases(self):
        """Names of tied parameters that are not owners."""
        last = str(len(self.whole.parts(self.whole.params)) - 1)
        return [name.replace("-1", last, 1) for name in self.tied.values()]

    def mean_loss(self, params, batch, key, *, training):
        """The author's loss of all rows at once, as a loop without a pipeline has it."""
        fields = jax.tree.map(lambda *rows: jnp.concatenate(rows), *batch)
        whole = Batch(fields, key, training)
        loss = self.loss(self.whole.output(params, whole), whole)
        return loss.total / loss.weight


def held(models, package, framework):
    """Tests of models of a package: functions of the rate of dropout that return a `Model`."""
    installed = f"{package} {version(packages_distributions()[package][0])}"

    def compared(request, model, stages, what, difference):
        row = (installed, framework, model.__name__, stages, what, difference)
        request.node.user_properties.append(("compared", row))
        assert difference <= TOLERANCE, f"{what}: {difference}"

    cuts = [*((model, 2) for model in models), (models[0], 4)]

    @pytest.mark.parametrize(("model", "stages"), cuts, ids=lambda it: getattr(it, "__name__", it))
    def test_three_steps_are_those_of_the_whole_model(model, stages, request):
        compared(request, model, stages, "training", trained(model(0.0), stages))

    @pytest.mark.parametrize("model", models, ids=lambda model: model.__name__)
    def test_evaluation_is_the_authors(model, request):
        compared(request, model, 2, "evaluation", evaluated(model(DROPOUT)))

    return test_three_steps_are_those_of_the_whole_model, test_evaluation_is_the_authors


def trained(model, stages):
    """The largest difference in losses, gradients and trained parameters."""
    tx = optax.sgd(0.1, momentum=0.9)
    params = model.whole.params
    state = tx.init(params)
    value_and_grad = jax.jit(jax.value_and_grad(partial(model.mean_loss, training=True)))
    trainer = trainer_of(model, tx, stages)
    trainer.start()
    worst = 0.0
    for step in range(STEPS):
        batch = model.batch(step)
        loss, gradient = value_and_grad(params, batch, jax.random.key(step))
        if step == 0:
            found = trainer.value_and_grad(batch)
            worst = max(
                worst,
                apart(found[0], loss),
                difference(found[1], model.whole.parts(gradient), model.aliases()),
            )
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        worst = max(worst, apart(next(iter(trainer.steps(1))).loss, loss))
    return max(worst, difference(trainer.stage_params, model.whole.parts(params), model.aliases()))


def evaluated(model):
    """How far the pipeline's evaluation is from the author's; a loss with dropout is another one."""
    trainer = trainer_of(model, optax.sgd(0.1), 2)
    batch = model.batch(0)
    key = jax.random.key(0)
    expected = jax.jit(partial(model.mean_loss, training=False))(model.whole.params, batch, key)
    assert not model.drops or apart(trainer.value_and_grad(batch)[0], expected) > 10 * TOLERANCE
    return apart(trainer.evaluate(batch).loss, expected)


def trainer_of(model, tx, stages):
    """A Trainer of the layers that begins with the author's parameters."""
    given = named(model.whole.parts(model.whole.params))
    pipe = rrfp.Pipeline(model.layers, model.loss, tied=model.tied)
    return rrfp.Trainer(
        pipe, tx, data=model.batch, mesh=rrfp.Mesh(pp=stages), init=lambda path, spec: given.get(path)
    )


def named(layers):
    """Arrays by layer and path."""
    layers = layers if isinstance(layers, dict) else {str(i): part for i, part in enumerate(layers)}
    found = tree_leaves_with_path(layers)
    return {keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in found}


def difference(found, expected, aliases):
    """The largest of all arrays, each relative to its largest value expected.

    Where that is below 1 % of the largest of all, as rounding errors are that stand for a gradient of 0 (of a
    bias of keys in attention), it is relative to this 1 %. Constants are in `found` only.
    """
    found, expected = named(found), named(expected)
    assert expected.keys() - found.keys() <= set(aliases), sorted(expected.keys() - found.keys())
    most = max(np.abs(leaf).max() for leaf in expected.values())
    shared = found.keys() & expected.keys()
    return max(apart(found[path], expected[path], floor=1e-2 * most) for path in shared)


def apart(found, expected, floor=0.0):
    """The largest difference of two arrays, relative to the largest value expected, or to `floor`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(expected).all() and np.isfinite(found).all()
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), floor))


# What models learn here.


def shaken(params):
    """Parameters none of which is all zeros or ones: of a layer that begins as zero nothing could be seen."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def cross_entropy(logits, mb):
    """Of every token, or of every row."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


def tokens(words, length):
    """Rows of tokens, their positions, and a causal mask."""

    def microbatch(random):
        row = random.integers(0, words, (ROWS, length + 1), dtype=np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (ROWS, length))
        mask = np.broadcast_to(np.tri(length, dtype=bool), (ROWS, length, length))
        return {"tokens": row[:, :-1], "labels": row[:, 1:], "positions": positions, "mask": mask}

    return microbatch


def images(shape, classes):
    """Images of a shape, and the class of each."""

    def microbatch(random):
        image = random.standard_normal((ROWS, *shape)).astype(np.float32)
        return {"image": image, "labels": random.integers(0, classes, ROWS, dtype=np.int32)}

    return microbatch


def squares(found, mb):
    """Of the distance from `target`."""
    return rrfp.Loss(((found - mb["target"]) ** 2).sum(), weight=found.size)
