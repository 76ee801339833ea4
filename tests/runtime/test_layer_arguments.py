"""What a layer or its class does not take is said, with what to write instead."""

import re
from pathlib import Path

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.runtime.model.user_errors import reason_of
from tests.runtime.test_layers import WIDTH, Table, head, head_init, tokens_only
from tests.support import toy


class Plain(nnx.Module):
    """Takes no random numbers; `others` go to its `__call__`."""

    def __init__(self, width, scale=1.0):
        self.scale = nnx.Param(jnp.full(width, scale))

    def __call__(self, x, mb):
        return x * self.scale[...]


class Random(Plain):
    def __init__(self, width, *, rngs):
        super().__init__(width)


class NoMicrobatch(Random):
    def __call__(self, x):
        return x


class Trained(Random):
    def __call__(self, x, mb, train):
        return x


class Wrong(Random):
    def __call__(self, x, mb):
        return abs(x, mb)


class LinenNoMicrobatch(linen.Module):
    width: int

    def __call__(self, x):
        return x


def no_microbatch(x):
    return x


def none(key):
    return {}


def refusal(make):
    """Of a model whose second layer is this one."""
    with pytest.raises(rrfp.UsageError) as refused:
        layers = [rrfp.layer(lambda carry, mb: mb["x"]), make()]
        rrfp.Pipeline(layers, toy.loss).shapes({"x": jax.ShapeDtypeStruct((2, WIDTH), np.float32)})
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: rrfp.layer(NoMicrobatch, WIDTH),
            "layer 1 (NoMicrobatch): __call__ must take (carry, mb); add mb",
        ),
        (lambda: rrfp.layer(Trained, WIDTH), "__call__ must take (carry, mb); give train a default"),
        (lambda: rrfp.layer(LinenNoMicrobatch, 3), "__call__ must take (carry, mb); add mb"),
        (lambda: rrfp.layer(no_microbatch), "layer 1 (no_microbatch): must take (carry, mb); add mb"),
        (lambda: rrfp.layer(lambda mb: 0), "must take (carry, mb); add carry"),
        (lambda: rrfp.layer(lambda x, mb: x, init=none), "must take (params, carry, mb); add params"),
        (
            lambda: rrfp.layer(Random),
            "layer 1 (Random): Random.__init__(): missing a required argument: 'width'; give what it takes "
            "after it, rrfp.layer(Random, width)",
        ),
        (
            lambda: rrfp.layer(Plain, 3, 4, 5),
            "too many positional arguments; give what it takes after it, rrfp.layer(",
        ),
        (lambda: rrfp.layer(Plain, 3, size=4), "unexpected keyword argument 'size'"),
        (
            lambda: rrfp.layer(LinenNoMicrobatch),
            "layer(LinenNoMicrobatch): LinenNoMicrobatch.__init__(): missing",
        ),
        (
            lambda: rrfp.layer(Random, WIDTH, nnx.Rngs(0)),
            "layer(Random): do not pass rngs: each stage makes its own",
        ),
        (lambda: rrfp.layer(Random, WIDTH, rngs=nnx.Rngs(0)), "do not pass rngs"),
        (
            lambda: rrfp.layer(Random, WIDTH, init=none),
            "init= is for pure functions; Random makes its parameters itself and takes no keyword named init",
        ),
        (lambda: rrfp.layer(LinenNoMicrobatch(3), init=none), "layer(LinenNoMicrobatch, init=<function none"),
        (lambda: rrfp.layer(Wrong, WIDTH), "failed when it was called with what layer 0"),  # inside
    ],
)
def test_what_a_layer_does_not_take_is_said(make, said):
    assert said in refusal(make)


def test_a_class_without_random_numbers_is_given_none():
    layers = [rrfp.layer(tokens_only), rrfp.layer(Table, toy.VOCABULARY), rrfp.layer(Plain, WIDTH, 2.0)]
    pipe = rrfp.Pipeline([*layers, rrfp.layer(head, init=head_init)], toy.loss)
    trainer = toy.trainer(1, pipe=pipe, data=toy.microbatches(1))
    trainer.start()
    assert trainer.stage_params["2"]["scale"].tolist() == [2.0] * WIDTH


def test_a_model_without_parameters_is_evaluated_but_not_trained():
    def loss(carry, mb):
        return rrfp.Loss(1.0 * carry["tokens"].sum(), weight=carry["tokens"].size)

    pipe, batch = rrfp.Pipeline([rrfp.layer(tokens_only)], loss), toy.microbatches(1)
    found = toy.trainer(1, pipe=pipe, optimizer=None).evaluate(batch)
    assert found.loss == pytest.approx(batch[0]["tokens"].mean())
    with pytest.raises(rrfp.UsageError, match="no parameter that it could update; give a layer parameters"):
        toy.trainer(1, pipe=pipe, data=batch).start()


def test_a_loss_that_takes_no_microbatch_is_refused():
    pipe = rrfp.Pipeline([rrfp.layer(tokens_only)], lambda carry: rrfp.Loss(0.0))
    with pytest.raises(rrfp.UsageError, match=r"the loss: must take \(carry, mb\); add mb"):
        pipe.shapes({"tokens": jax.ShapeDtypeStruct((2, WIDTH), np.int32)})


class Unbuilt(Random):
    def __init__(self, width, *, rngs):
        raise RuntimeError("no such model")


class Packaged(Random):
    def __call__(self, x, mb):
        return nnx.MultiHeadAttention(2, 3, rngs=nnx.Rngs(0))(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: rrfp.layer(Unbuilt, WIDTH),
            r"layer 1 \(Unbuilt\) cannot be built: RuntimeError: no such model",
        ),
        (lambda: rrfp.layer(Unbuilt, WIDTH), r"no such model \(test_layer_arguments.py, line \d+\)$"),
        (
            lambda: rrfp.layer(Packaged, WIDTH),
            r"layer 1 \(Packaged\) failed when it was called with what layer 0 \(<lambda>\) gives, "
            r"float32\[2, 4\]: ValueError: .*\(test_layer_arguments.py, line \d+; "
            r"raised in flax/nnx/nn/attention.py, line \d+\)",
        ),
        (
            lambda: rrfp.layer(make=lambda key: {}["lost"], call=None),
            r"layer 1 \(<lambda>\) cannot be built: KeyError: 'lost' \(test_layer_arguments.py, line \d+\)",
        ),
    ],
)
def test_which_step_failed_and_where_is_said(make, said):
    assert re.search(said, refusal(make))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (str(Path(jax.__file__).parent) + "typing/checked.py", "; raised in jaxtyping/checked.py, line 1"),
        (str(Path(rrfp.__file__).parent) + "_models/block.py", "(block.py, line 1"),
        (rrfp.__file__, "(test_layer_arguments.py, line "),
        (jax.__file__, "(test_layer_arguments.py, line "),
    ],
    ids=["jaxtyping", "rrfp_jax_models", "rrfp_jax", "jax"],
)
def test_code_whose_folder_only_begins_like_one_of_ours_or_jax_is_named(file, said):
    exec(compile("def fail(): raise ValueError('no')", file, "exec"), space := {})
    with pytest.raises(ValueError, match="no") as raised:
        space["fail"]()
    assert said in reason_of(raised.value)
