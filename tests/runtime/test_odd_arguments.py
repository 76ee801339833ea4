"""What models and optimizers of others bring along: numbers, absent fields, keys, unwanted arguments."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.weights.tensors import converted

BATCH = [{"x": np.ones((2, 4), np.float32)}] * 2


def enter(weight, x, mb):
    return mb["x"] @ weight


def loss(x, mb):
    return rrfp.Loss((x**2).sum(), weight=x.shape[0])


def trained(layer, optimizer=None):
    first = rrfp.layer(enter, init=lambda key: jnp.eye(4))
    trainer = rrfp.Trainer(rrfp.Pipeline([first, layer], loss), optimizer or optax.sgd(0.1))
    trainer.step(BATCH)
    return trainer


class Scaled(nnx.Module):
    def __init__(self, *, rngs):
        self.scale, self.times = nnx.Param(1.5), nnx.Variable(2)

    def __call__(self, x, mb):
        return x * self.scale[...] * self.times[...]


class Built(nn.Module):
    @nn.compact
    def __call__(self, x, mb):
        return nn.Dense(4)(x)


def test_plain_numbers_of_a_module_are_arrays():
    trainer = trained(rrfp.layer(Scaled))
    gradient = 2 * 3.0**2 / 1.5 * 4  # of the loss, 8 squares of 3, over the weight of 2, by 1.5
    np.testing.assert_allclose(trainer.stage_params["1"]["scale"], 1.5 - 0.1 * gradient, rtol=1e-6)


def test_a_layer_may_be_prepared_for_a_field_that_is_absent():
    def layer(x, mb):
        try:
            return x * mb["mask"]
        except KeyError:
            return 2 * x

    assert trained(rrfp.layer(layer)).step(BATCH).loss > 0
    with pytest.raises(rrfp.UsageError, match=r"reads mb\['mask'\], but microbatches have the fields: x"):
        trained(rrfp.layer(lambda x, mb: x * mb["mask"]))


def test_arguments_beside_a_built_module_are_refused():
    with pytest.raises(rrfp.UsageError, match=r"is built already, and takes no 7, repeats"):
        rrfp.layer(Built(), 7, repeats=4)


def test_a_typed_key_among_hyperparameters_is_none_of_the_numbers():
    make = optax.inject_hyperparams(optax.noisy_sgd)
    own = trained(rrfp.layer(Built()), make(learning_rate=0.01, key=jax.random.key(3)))
    assert own.step(BATCH).hyperparams["learning_rate"] == np.float32(0.01)


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz"])
def test_what_is_too_large_for_a_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="1 values such as 1e"):
        converted(np.float32([1.0, 1e6]), jnp.dtype(dtype))
    assert converted(np.float32([np.nan, 1.0]), jnp.dtype(dtype))[1] == 1


class FromData(nn.Module):
    @nn.compact
    def __call__(self, x, mb):
        return x * self.param("scale", lambda key: 1 / (x.std(0) + 1e-6))


@pytest.mark.parametrize(
    "layer",
    [
        rrfp.layer(FromData),
        rrfp.layer(lambda p, x, mb: x * p["scale"], init=lambda key, x, mb: {"scale": mb["x"].std(0)}),
    ],
)
def test_initial_values_that_follow_from_data_are_refused(layer):
    with pytest.raises(rrfp.UsageError, match="makes the initial value of scale from a microbatch or the"):
        trained(layer)


class OneOfTwo(nn.Module):
    @nn.compact
    def __call__(self, x, mb):
        return nn.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: m(x) / 2, nn.Dense(4), x)


def test_initial_values_may_be_made_in_branches_that_data_choose_between():
    assert len(jax.tree.leaves(trained(rrfp.layer(OneOfTwo)).params())) == 3


def test_a_state_takes_the_shape_that_its_first_update_gives():
    def update(gradients, state, params=None):
        state = jax.tree.map(lambda s, g: 0.9 * s + g, state, gradients)
        return jax.tree.map(lambda s: -0.1 * s, state), state

    optimizer = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda _: jnp.zeros(()), params), update
    )
    own = trained(rrfp.layer(Built()), optimizer)
    own.step(BATCH)
    expected = trained(rrfp.layer(Built()), optax.sgd(0.1, momentum=0.9))
    expected.step(BATCH)
    for a, b in zip(*(jax.tree.leaves(t.stage_params) for t in (own, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_config_with_dtypes_is_kept_by_their_names(tmp_path):
    own = trained(rrfp.layer(Built()))
    own.save(tmp_path, config={"model": {"dtype": jnp.bfloat16, "width": 4}})
    assert CheckpointFolder(tmp_path).open(1)[0].config == {"model": {"dtype": "bfloat16", "width": 4}}


def other_when_evaluating(other):
    return lambda x, mb: x if mb.training else other(x)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda x: x[:, :2], r"layer 1 \(.*\): gives float32\[2, 2\] when evaluating.*but float32\[2, 4\]"),
        (lambda x: x.astype(jnp.bfloat16), r"layer 1 \(.*\): gives bfloat16\[2, 4\] when evaluating"),
        (lambda x: {"x": x}, r"layer 1 \(.*\): gives \{'x': float32\[2, 4\]\} when evaluating"),
        (lambda x: x @ x, r"layer 1 \(.*\) failed when it was called to evaluate.*: TypeError"),
    ],
    ids=["shape", "dtype", "structure", "failure"],
)
def test_layers_that_give_something_else_when_evaluating_are_refused(other, said):
    first = rrfp.layer(enter, init=lambda key: jnp.eye(4))
    layer, last = (rrfp.layer(other_when_evaluating(own)) for own in (other, lambda x: x))
    trainer = rrfp.Trainer(rrfp.Pipeline([first, layer, last], loss), optax.sgd(0.1))
    trainer.step(BATCH)
    with pytest.raises(rrfp.UsageError, match=said):
        trainer.evaluate(BATCH)
    trainer.step(BATCH)


def test_fields_that_only_training_reads_are_not_asked_of_an_evaluation():
    """Neither to call a layer or the loss, nor to know its parameters' shapes."""

    def noisy(weight, x, mb):
        return (mb["x"] + mb["noise"] if mb.training else mb["x"]) @ weight

    first = rrfp.layer(noisy, init=lambda key, x, mb: jnp.eye(mb["noise"].shape[-1]))
    pipe = rrfp.Pipeline([first], lambda x, mb: loss(x * mb["noise"] if mb.training else x, mb))
    trainer = rrfp.Trainer(pipe, optax.sgd(0.0), data=[{**BATCH[0], "noise": BATCH[0]["x"]}])
    assert trainer.evaluate(BATCH).loss == 4.0
    (report,) = trainer.steps(1)
    assert report.loss == 16.0


def test_the_last_layer_may_give_its_loss_something_else_when_evaluating():
    first = rrfp.layer(enter, init=lambda key: jnp.eye(4))
    last = rrfp.layer(other_when_evaluating(lambda x: x[:, :2]))
    trainer = rrfp.Trainer(rrfp.Pipeline([first, last], loss), optax.sgd(0.0))
    trainer.step(BATCH)
    assert trainer.evaluate(BATCH).loss == 2.0


def test_a_loss_that_fails_only_when_evaluating_is_named():
    def odd(x, mb):
        return loss(x if mb.training else x @ x, mb)

    first = rrfp.layer(enter, init=lambda key: jnp.eye(4))
    trainer = rrfp.Trainer(rrfp.Pipeline([first], odd), optax.sgd(0.1))
    trainer.step(BATCH)
    with pytest.raises(rrfp.UsageError, match=r"the loss failed when it was called to evaluate.*TypeError"):
        trainer.evaluate(BATCH)


def test_where_jax_is_to_promote_no_dtypes_counts_are_still_metrics_and_weights():
    def counting(x, mb):
        rows = (mb["x"][:, 0] > 0).sum()
        return rrfp.Loss((x**2).sum(), weight=rows, metrics={"rows": rows})

    first = rrfp.layer(enter, init=lambda key: jnp.eye(4))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    try:
        trainer = rrfp.Trainer(rrfp.Pipeline([first], counting), optax.sgd(0.1), data=lambda step: BATCH)
        report = trainer.step(BATCH)
        assert (report.loss, report.metrics["rows"]) == (4.0, 1.0)
        assert trainer.check().ok
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "standard")


class Wide(nn.Module):
    width: int
    bias: bool = True

    @nn.compact
    def __call__(self, x, mb):
        return nn.Dense(self.width, use_bias=self.bias)(x)


def test_a_partial_of_a_modules_class_is_that_class_with_these_arguments():
    assert len(jax.tree.leaves(trained(rrfp.layer(partial(Wide, 4), bias=False)).params())) == 2
    assert len(jax.tree.leaves(trained(rrfp.layer(partial(partial(Wide, 4), bias=True))).params())) == 3
    assert len(jax.tree.leaves(trained(rrfp.layer(partial(Scaled))).params())) == 3


@jax.tree_util.register_pytree_node_class
class Boxed:
    """Without words of its own: two of them have different texts."""

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return [self.x], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_a_carry_of_an_authors_class_is_evaluated():
    box, unbox = (
        rrfp.layer(lambda x, mb: Boxed(mb["x"])),
        rrfp.layer(lambda w, box, mb: box.x @ w, init=lambda key: jnp.eye(4)),
    )
    trainer = rrfp.Trainer(rrfp.Pipeline([box, unbox, rrfp.layer(Built())], loss), optax.sgd(0.0))
    trainer.step(BATCH)
    assert trainer.evaluate(BATCH).loss > 0


def test_a_metric_that_a_layer_has_only_when_evaluating_takes_no_name_of_reports():
    def telling(x, mb):
        return x if mb.training else (x, rrfp.Loss(0.0, 0.0, {"loss": x.sum()}))

    trainer = trained(rrfp.layer(telling))
    with pytest.raises(rrfp.UsageError, match="Loss metric 'loss': reports use that name"):
        trainer.evaluate(BATCH)
