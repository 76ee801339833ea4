"""Refused at the start: optimizers that couple stages, names of parameters that do not fit."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from tests.support import toy
from tests.support.refusals import make, refused


@pytest.mark.usefixtures("nothing_compiles")
class TestOptimizers:
    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            optax.apply_if_finite(optax.sgd(1e-3), 3),
            optax.stateless(lambda g, p: jax.tree.map(lambda leaf: leaf * optax.tree.norm(p), g)),
        ],
        ids=["clip_by_global_norm", "apply_if_finite", "by-the-norm-of-all-parameters"],
    )
    def test_one_that_couples_stages(self, optimizer):
        with refused("the update of 0.table", "of 4.bias", "another stage", "clip_norm="):
            make(2, optimizer=optimizer)
        make(1, optimizer=optimizer)

    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.adamw(1e-3, mask=partial(jax.tree.map, lambda leaf: leaf.ndim > 1)),
            optax.sgd(1e-3, momentum=0.9),
            optax.adafactor(1e-3),
            optax.lion(1e-3),
            optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 10))),
            optax.MultiSteps(optax.adam(1e-3), 2),
        ],
        ids=["adamw-mask", "sgd", "adafactor", "lion", "schedule", "MultiSteps"],
    )
    def test_one_that_does_not_is_accepted(self, optimizer):
        make(2, optimizer=optimizer)

    @pytest.mark.parametrize(
        "build",
        [
            lambda specs: optax.adamw(1e-3, mask=jax.tree.map(lambda leaf: leaf.ndim > 1, specs["0"])),
            lambda specs: optax.lbfgs(1e-3),
            lambda specs: optax.adamw,
            lambda specs: 1e-3,
        ],
        ids=["mask-of-one-layer", "lbfgs", "not-called", "number"],
    )
    def test_one_that_cannot_run_on_a_stage(self, build):
        specs = make()._engine.library.params
        with refused("optimizer"):
            make(optimizer=build(specs))


@pytest.mark.usefixtures("nothing_compiles")
class TestFrozenAndTied:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"frozen": "2.gate"}, ["frozen='2.gate'", "no parameter", "0.table, 1.bias, 1.down, "]),
            ({"frozen": ["0.*", "9.*"]}, ["frozen='9.*'", "no parameter"]),
            ({"frozen": "*"}, ["freezes every parameter", "nothing is left to train"]),
            ({"frozen": [3]}, ["frozen", "3", "names"]),
            (
                {"tied": {"0.tab": "-1.out"}},
                ["tied={'0.tab': '-1.out'}", "no parameter '0.tab'", "0.table, 1."],
            ),
            ({"tied": {"1.up": "-9.up"}}, ["no parameter '-9.up'"]),
            ({"tied": {"0.table": "-1.out"}}, ["float32[13, 16]", "float32[16, 13]", "transpose"]),
            ({"tied": {"1.up": "1.up"}}, ["one owner", "no alias itself"]),
            ({"tied": {"1.up": "2.up", "3.up": "2.up"}}, ["tied={'3.up': '2.up'}", "one owner"]),
            ({"tied": {"1.up": "2.up", "2.up": "3.up"}}, ["tied={'2.up': '3.up'}", "no alias itself"]),
            ({"tied": {"1.up": 2}}, ["tied", "2", "names"]),
            ({"tied": [("1.up", "2.up")]}, ["tied=[('1.up', '2.up')]", "dict"]),
            ({"frozen": "-9.*"}, ["frozen='-9.*'", "no parameter"]),
        ],
        ids=str,
    )
    def test_names_that_do_not_fit(self, settings, said):
        with refused(*said):
            make(pipe=toy.pipeline(**settings))

    def test_whole_numbers_cannot_be_trained(self):
        def init(key):
            return {"rows": np.arange(2), **toy.head_init(key)}

        def head(params, carry, mb):
            return toy.head(params, {"x": carry["x"][params["rows"]]}, mb)

        layers = [*toy.layers()[:-1], rrfp.layer(head, init=init)]
        with refused("7.rows", "int32", "frozen='7.rows'"):
            make(pipe=rrfp.Pipeline(layers, toy.loss))
        make(pipe=rrfp.Pipeline(layers, toy.loss, frozen="-1.rows"))

    def test_an_optimizer_that_couples_stages_through_what_is_frozen_is_accepted(self):
        coupled = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        make(2, optimizer=coupled, pipe=toy.pipeline(frozen=["0.*", "1.*", "2.*", "3.*"]))
        with refused("another stage"):
            make(2, optimizer=coupled, pipe=toy.pipeline(frozen=["0.*", "1.*", "2.*"]))
