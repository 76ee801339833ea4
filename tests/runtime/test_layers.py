"""What a layer may be and do, and what is said of arguments that it does not take."""

import re
from collections import OrderedDict
from pathlib import Path

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.runtime.model.roles import Roles, leaf_paths
from rrfp_jax.runtime.model.user_errors import reason_of
from rrfp_jax.schedules import FORWARD
from tests.support import toy

WIDTH = 4
WEIGHT = 16  # rows and columns of the weights that must not be saved per microbatch


class Table(nnx.Module):
    def __init__(self, size, *, rngs):
        self.rows = nnx.Param(jax.random.normal(rngs.params(), (size, WIDTH)))

    def __call__(self, carry, mb):
        return self.rows[...][carry["tokens"]]


class Waves(nnx.Module):
    def __init__(self, scales):
        self.scales = nnx.List(nnx.Param(scale) for scale in scales)

    def __call__(self, carry, mb):
        for scale in self.scales:  # more than ten, and their order matters
            carry = jnp.sin(carry * scale[...])
        return carry


class Mix(linen.Module):
    features: int

    @linen.compact
    def __call__(self, carry, mb):
        return jnp.tanh(linen.Dense(self.features)(carry))


def tokens_only(carry, mb):
    assert carry is None
    return {"tokens": mb["tokens"]}


def waves(count, rngs):
    return Waves(1 + jax.random.uniform(rngs.params(), (count, WIDTH)))


def head(params, carry, mb):
    return carry @ params["out"]


def head_init(key):
    return {"out": jax.random.normal(key, (WIDTH, toy.VOCABULARY))}


def test_every_kind_of_layer_trains_like_plain_jax():
    layers = [
        rrfp.layer(tokens_only),  # a stage without parameters, sending integers only
        rrfp.layer(Table, toy.VOCABULARY),
        rrfp.layer(waves, 11),
        rrfp.layer(Mix, features=2 * WIDTH),
        rrfp.layer(Mix(WIDTH)),
        rrfp.layer(head, init=head_init),
    ]

    @jax.jit
    @jax.value_and_grad
    def plain(params, batch):
        carry = params["1"]["rows"][batch["tokens"]]
        for i in range(11):
            carry = jnp.sin(carry * params["2"]["scales"][i])
        for name in ("3", "4"):
            carry = jnp.tanh(carry @ params[name]["Dense_0"]["kernel"] + params[name]["Dense_0"]["bias"])
        total, weight = toy.sums(carry @ params["5"]["out"], batch)
        return total / weight

    batch, optimizer = toy.microbatches(3), optax.sgd(0.5, momentum=0.9)
    trainer = toy.trainer(
        3, pipe=rrfp.Pipeline(layers, toy.loss), split=(1, 3, 2), optimizer=optimizer, data=batch
    )
    trainer.start()
    params = jax.device_get(trainer.stage_params)
    state = optimizer.init(params)
    for _ in range(2):
        loss, gradient = plain(params, together(batch))
        assert toy.worst_leaf(trainer.value_and_grad(batch)[1], gradient) <= 1e-5
        assert trainer.step(batch).loss == pytest.approx(float(loss), rel=1e-6)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for got, expected in zip(jax.tree.leaves(trainer.stage_params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def together(batch):
    return {name: jnp.concatenate([jnp.asarray(mb[name]) for mb in batch]) for name in batch[0]}


def auxiliary_batch(extra):
    rows = np.random.default_rng(0).random((3, 2), np.float32)
    return [{"x": x, "extra": np.full(2, extra, np.float32)} for x in rows]


@pytest.fixture(scope="module", params=[1, 3], ids=["one stage", "three stages"])
def auxiliary(request):
    """A model whose middle layer adds a term of its own, with a metric that the loss has as well."""

    def scale(params, carry, mb):
        return params["w"] * (mb["x"] if carry is None else carry)

    def penalised(params, carry, mb):
        metrics = {"square": (carry**2).sum(), "rows": carry.shape[0]}
        term = rrfp.Loss((params["w"] * carry**2).sum(), weight=mb["extra"].sum(), metrics=metrics)
        return carry + params["w"], term

    def loss(carry, mb):
        return rrfp.Loss((carry**3).sum(), weight=carry.shape[0], metrics={"rows": carry.shape[0]})

    def init(key):
        return {"w": jax.random.normal(key, ())}

    pipe = rrfp.Pipeline([rrfp.layer(kind, init=init) for kind in (scale, penalised, scale)], loss)
    return toy.trainer(request.param, pipe=pipe, data=auxiliary_batch(0.0))


@pytest.mark.parametrize("extra", [0.0, 2.5])
def test_an_auxiliary_term_counts_in_loss_gradient_and_metrics(auxiliary, extra):
    @jax.jit
    def plain(params, whole):
        first = params["0"]["w"] * whole["x"]
        last = params["2"]["w"] * (first + params["1"]["w"])
        total = (params["1"]["w"] * first**2).sum() + (last**3).sum()
        return total / (6 + whole["extra"].sum()), (first**2).sum()

    trainer, batch = auxiliary, auxiliary_batch(extra)
    trainer.start()
    params = jax.device_get(trainer.stage_params)
    (loss, square), expected = jax.value_and_grad(plain, has_aux=True)(params, together(batch))
    value, gradient = trainer.value_and_grad(batch)
    assert value == pytest.approx(float(loss), rel=1e-6)
    assert toy.worst_leaf(gradient, expected) <= 1e-5
    weight = 6 + 6 * extra
    for report in (trainer.evaluate(batch), trainer.step(batch)):
        assert report.weight == weight
        assert report.loss == pytest.approx(float(loss), rel=1e-6)
        assert report.metrics == pytest.approx({"square": float(square) / weight, "rows": 12 / weight})


@pytest.mark.parametrize(
    "settings", [{"frozen": ("*.a",)}, {"tied": [("1.a", "0.a")]}], ids=["frozen", "tied"]
)
def test_an_ordered_dict_without_some_of_its_leaves_keeps_its_order(settings):
    params = {str(i): OrderedDict(w=np.ones(2), v=np.ones(2), a=np.ones(2)) for i in range(2)}
    roles, paths = Roles.of(params, **settings).leaves(params), leaf_paths(params)
    assert leaf_paths(roles.tree(roles.owned, roles.owned)) == [paths[place] for place in roles.owned]
    assert jax.tree.leaves(roles.tree(roles.owned, roles.owned)) == [*roles.owned]


@pytest.mark.parametrize("stages", [1, 3])
def test_a_rule_may_add_a_gradient_to_one_that_comes_from_another_stage(stages):
    """An auxiliary loss whose term is not in the sum: its gradient is added where the last layer passes."""

    @jax.custom_vjp
    def with_term(x, term):
        return x

    with_term.defvjp(lambda x, term: (x, None), lambda _, cotangent: (cotangent, jnp.float32(5)))

    def first(params, carry, mb):
        return {"x": params["w"] * mb["x"], "term": params["w"] ** 2}

    def middle(params, carry, mb):
        return {"x": params["w"] * carry["x"], "term": carry["term"] + params["w"] ** 2}

    def last(params, carry, mb):
        return with_term(params["w"] * carry["x"], carry["term"])

    def total(params, whole):
        carry = middle(params["1"], first(params["0"], None, whole), whole)
        return (last(params["2"], carry, whole) ** 3).sum()

    layers = [
        rrfp.layer(kind, init=lambda key: {"w": jax.random.normal(key, ())}) for kind in (first, middle, last)
    ]
    batch = auxiliary_batch(0.0)
    pipe = rrfp.Pipeline(layers, lambda carry, mb: rrfp.Loss((carry**3).sum(), weight=carry.shape[0]))
    trainer = toy.trainer(stages, pipe=pipe, data=batch)
    trainer.start()
    params = jax.device_get(trainer.stage_params)
    parts = [jax.grad(total)(params, mb) for mb in batch]
    expected = jax.tree.map(lambda *own: sum(own) / 6, *parts)
    assert toy.worst_leaf(trainer.value_and_grad(batch)[1], expected) <= 1e-5
    assert trainer.check().ok


@pytest.fixture(scope="module")
def bfloat16():
    """bfloat16 layers of float32 weights, one to a stage, and a microbatch of one row."""

    def start(carry, mb):
        return mb["x"].astype(jnp.bfloat16)

    def cast_outside(params, carry, mb):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, carry, params["w"].astype(jnp.bfloat16))[0]

    def cast_inside(params, carry, mb):
        def body(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(body, carry, params["w"])[0]

    @jax.checkpoint
    def recomputed(params, carry, mb):
        first, second, _ = params["w"].astype(jnp.bfloat16)
        inner = jnp.tanh(carry @ first) + mb["x"].astype(jnp.bfloat16)
        return jnp.tanh(inner @ second)

    def loss(carry, mb):
        return rrfp.Loss((carry.astype(jnp.float32) ** 2).sum(), weight=carry.shape[0])

    def init(key):
        return {"w": jax.random.normal(key, (3, WEIGHT, WEIGHT)) / WEIGHT**0.5}

    kinds = [rrfp.layer(kind, init=init) for kind in (cast_outside, cast_inside, recomputed)]
    pipe = rrfp.Pipeline([rrfp.layer(start), *kinds], loss)
    batch = [{"x": x} for x in np.random.default_rng(0).random((2, 1, WEIGHT), np.float32)]
    trainer = toy.trainer(4, pipe=pipe, data=batch)
    trainer.start()
    return trainer


def weighted(trainer):
    """The programs of the stages that have weights."""
    (compiled,) = trainer._engine.library.all_programs("train")
    return [virtual_stage for stage in compiled.values() for virtual_stage in stage][1:]


def held_bytes(program):
    return program.tasks[FORWARD].held_bytes


class TestWhatAMicrobatchHolds:
    def test_nothing_made_from_weights_alone(self, bfloat16):
        for program, stage in zip(weighted(bfloat16), bfloat16.start()[1:], strict=True):
            saved = [var.aval for var in program.segments[0].traced.forward.closed.jaxpr.outvars]
            assert all(aval.shape[-2:] != (WEIGHT, WEIGHT) for aval in saved)
            assert held_bytes(program) < 2 * WEIGHT * WEIGHT  # one bfloat16 matrix
            assert held_bytes(program) == stage.largest.held_bytes
            assert held_bytes(program) >= 2 * WEIGHT  # one bfloat16 activation

    def test_casts_of_scanned_weights_are_prepared_once_a_step(self, bfloat16):
        for program in weighted(bfloat16)[:2]:
            prepared = [var.aval for var in program.segments[0].traced.prepare.closed.jaxpr.outvars]
            assert ((3, WEIGHT, WEIGHT), jnp.bfloat16) in [(aval.shape, aval.dtype) for aval in prepared]

    def test_inputs_only_where_a_layer_is_checkpointed(self, bfloat16):
        program = weighted(bfloat16)[2]
        assert held_bytes(program) <= (2 + 4 + 4) * WEIGHT  # carry, field, and what the loss squares

    def test_gradients_are_right(self, bfloat16):
        report = bfloat16.check()
        assert report.loss_error <= 1e-2 and report.worst[1] <= 3e-2  # bfloat16 has 8 bits
        assert len(report.leaf_errors) == 3
        assert {leaf.dtype for leaf in jax.tree.leaves(bfloat16.stage_params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("carried", "frozen"),
    [
        (lambda x: (x, None, {"i": jnp.arange(3), "m": x > 0, "u": x.astype(jnp.uint8)}), []),
        (lambda x: {"late": 2 * x, "early": [x, jnp.zeros((2, 0))], "whole": x[0]}, []),
        (lambda x: {"i": x.astype(jnp.int32)}, ["0.w"]),  # no gradient reaches the first layer
        (lambda x: None, ["0.w"]),
    ],
    ids=["integers-and-none", "nested", "integers-only", "none"],
)
def test_any_pytree_is_carried_between_stages(carried, frozen):
    def first(params, carry, mb):
        return carried(params["w"] * mb["x"])

    def last(params, carry, mb):
        return params["w"] * (
            mb["x"] + sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(carry))
        )

    def loss(carry, mb):
        return rrfp.Loss(carry.sum(), weight=carry.shape[0])

    def init(key):
        return {"w": jnp.full((), 3.0)}

    layers = [rrfp.layer(first, init=init), rrfp.layer(last, init=init)]
    pipe = rrfp.Pipeline(layers, loss, frozen=frozen)
    batch = [{"x": np.full(2, 5.0, np.float32)}] * 2
    assert toy.trainer(2, pipe=pipe, data=batch).check().ok


def started(init):
    kinds = [rrfp.layer(tokens_only), rrfp.layer(Table, toy.VOCABULARY), rrfp.layer(waves, 2)]
    pipe = rrfp.Pipeline([*kinds, rrfp.layer(head, init=head_init)], toy.loss)
    trainer = toy.trainer(2, pipe=pipe, init=init, data=toy.microbatches(1))
    trainer.start()
    return trainer


class TestInitialValues:
    @pytest.mark.slow(reason="2 s: two Trainers; the test of all that are given asks alike")
    def test_some_are_given(self):
        asked = {}

        def init(path, spec):
            asked[path] = (spec.shape, spec.dtype)
            return np.full(spec.shape, 7, spec.dtype) if path == "2.scales.1" else None

        params, own = (jax.device_get(started(function).stage_params) for function in (init, None))
        assert asked == {
            "1.rows": ((toy.VOCABULARY, WIDTH), np.float32),
            "2.scales.0": ((WIDTH,), np.float32),
            "2.scales.1": ((WIDTH,), np.float32),
            "3.out": ((WIDTH, toy.VOCABULARY), np.float32),
        }
        assert (params["2"]["scales"].pop(1) == 7).all() and (own["2"]["scales"].pop(1) != 7).all()
        chex.assert_trees_all_equal(params, own)

    def test_all_are_given_and_no_layer_makes_its_own(self, monkeypatch):
        monkeypatch.setattr(rrfp.Pipeline, "init_layer", lambda *args: pytest.fail("initialised a layer"))
        params = started(lambda path, spec: jnp.full(spec.shape, len(path), spec.dtype)).stage_params
        assert float(params["1"]["rows"][0, 0]) == len("1.rows")
        assert {float(leaf[0]) for leaf in jax.tree.leaves(params["2"])} == {len("2.scales.0")}

    @pytest.mark.parametrize(
        "wrong",
        [np.zeros(3, np.float32), np.zeros(WIDTH, np.float16), [0.0] * WIDTH],
        ids=["shape", "dtype", "list"],
    )
    def test_a_wrong_one_is_refused(self, wrong):
        with pytest.raises(rrfp.UsageError, match=r"init\('2.scales.0'\).*float32\[4\]"):
            started(lambda path, spec: wrong if path == "2.scales.0" else None)


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
            lambda: rrfp.layer(Random, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))),
            "layer(Random): it is given a module that is already built, of which every layer",
        ),
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


def test_a_module_with_random_streams_leaks_no_tracer():
    dropout = rrfp.layer(nnx.Dropout, 0.5, call=lambda module, x, mb: module(x))
    with jax.checking_leaks():
        toy.trainer(1, pipe=rrfp.Pipeline([*toy.layers(), dropout], toy.loss)).start()


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
        (lambda: rrfp.layer(Unbuilt, WIDTH), r"no such model \(test_layers.py, line \d+\)$"),
        (
            lambda: rrfp.layer(Packaged, WIDTH),
            r"layer 1 \(Packaged\) failed when it was called with what layer 0 \(<lambda>\) gives, "
            r"float32\[2, 4\]: ValueError: .*\(test_layers.py, line \d+; "
            r"raised in flax/nnx/nn/attention.py, line \d+\)",
        ),
        (
            lambda: rrfp.layer(make=lambda key: {}["lost"], call=None),
            r"layer 1 \(<lambda>\) cannot be built: KeyError: 'lost' \(test_layers.py, line \d+\)",
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
        (rrfp.__file__, "(test_layers.py, line "),
        (jax.__file__, "(test_layers.py, line "),
    ],
    ids=["jaxtyping", "rrfp_jax_models", "rrfp_jax", "jax"],
)
def test_code_whose_folder_only_begins_like_one_of_ours_or_jax_is_named(file, said):
    exec(compile("def fail(): raise ValueError('no')", file, "exec"), space := {})
    with pytest.raises(ValueError, match="no") as raised:
        space["fail"]()
    assert said in reason_of(raised.value)
