"""What a layer may be and do: flax modules and functions, auxiliary terms, random keys, odd carries."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from tests import toy

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

    def mean_loss(params, batch):
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
    params = jax.device_get(trainer.params)
    state = optimizer.init(params)
    for _ in range(2):
        loss, gradient = jax.value_and_grad(mean_loss)(params, together(batch))
        assert toy.worst_leaf(trainer.value_and_grad(batch)[1], gradient) <= 1e-5
        assert trainer.step(batch).loss == pytest.approx(float(loss), rel=1e-6)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for got, expected in zip(jax.tree.leaves(trainer.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def together(batch):
    return {name: jnp.concatenate([jnp.asarray(mb[name]) for mb in batch]) for name in batch[0]}


class TestAuxiliaryLoss:
    """A term added in the middle of the model counts in loss, gradient and metrics like the loss itself."""

    @pytest.fixture(scope="class")
    def trainer(self):
        def scale(params, carry, mb):
            return params["w"] * (mb["x"] if carry is None else carry)

        def penalised(params, carry, mb):
            term = rrfp.Loss(
                (params["w"] * carry**2).sum(),
                weight=mb["extra"].sum(),
                metrics={"square": (carry**2).sum(), "rows": 1.0 * carry.shape[0]},
            )
            return carry + params["w"], term

        def loss(carry, mb):
            return rrfp.Loss((carry**3).sum(), weight=carry.shape[0], metrics={"rows": carry.shape[0]})

        def init(key):
            return {"w": jax.random.normal(key, ())}

        kinds = [scale, penalised, scale]
        pipe = rrfp.Pipeline([rrfp.layer(kind, init=init) for kind in kinds], loss)
        return toy.trainer(3, pipe=pipe, data=self.batch(0.0))

    @staticmethod
    def batch(extra):
        rows = np.random.default_rng(0).random((3, 2), np.float32)
        return [{"x": x, "extra": np.full(2, extra, np.float32)} for x in rows]

    @staticmethod
    def plain(params, whole):
        first = params["0"]["w"] * whole["x"]
        last = params["2"]["w"] * (first + params["1"]["w"])
        total = (params["1"]["w"] * first**2).sum() + (last**3).sum()
        return total / (6 + whole["extra"].sum()), (first**2).sum()

    @pytest.mark.parametrize("extra", [0.0, 2.5])
    def test_loss_gradient_and_metrics(self, trainer, extra):
        batch = self.batch(extra)
        trainer.start()
        params = jax.device_get(trainer.params)
        (loss, square), expected = jax.value_and_grad(self.plain, has_aux=True)(params, together(batch))
        value, gradient = trainer.value_and_grad(batch)
        assert value == pytest.approx(float(loss), rel=1e-6)
        assert toy.worst_leaf(gradient, expected) <= 1e-5
        weight = 6 + 6 * extra
        for report in (trainer.evaluate(batch), trainer.step(batch)):  # the step changes the parameters
            assert report.weight == weight
            assert report.loss == pytest.approx(float(loss), rel=1e-6)
            assert report.metrics == pytest.approx({"square": float(square) / weight, "rows": 12 / weight})


class TestRandomKeys:
    """Each layer adds w * noise(mb.key) * x with w = 1, so the gradient of its w is the noise that it drew."""

    @staticmethod
    def trainer(**kwargs):
        def noisy(params, carry, mb):
            return (0.0 if carry is None else carry) + params["w"] * jax.random.normal(mb.key) * mb["x"]

        def loss(carry, mb):
            return rrfp.Loss(carry.sum(), weight=mb["x"].shape[0])

        def init(key):
            return {"w": jnp.ones(())}

        kinds = [noisy, jax.checkpoint(noisy), noisy]  # the second draws again in the backward pass
        pipe = rrfp.Pipeline([rrfp.layer(kind, init=init) for kind in kinds], loss)
        batch = [{"x": np.zeros(1, np.float32)}] * 3
        return toy.trainer(2, pipe=pipe, optimizer=optax.sgd(0.0), data=batch, **kwargs)

    @staticmethod
    def noise(trainer, chosen):
        """The loss, and what each layer drew in its backward, for one of three microbatches."""
        batch = [{"x": np.full(1, 3.0 * (j == chosen), np.float32)} for j in range(3)]
        value, gradient = trainer.value_and_grad(batch)
        return value, [float(gradient[str(i)]["w"]) for i in range(3)]

    def drawn(self, trainer):
        return [number for j in range(3) for number in self.noise(trainer, j)[1]]

    @pytest.fixture(scope="class")
    def shared(self):
        return self.trainer()

    def test_forward_and_backward_draw_the_same(self, shared):
        value, numbers = self.noise(shared, 1)
        assert value == pytest.approx(sum(numbers), rel=1e-5)

    def test_microbatches_layers_and_steps_draw_differently(self, shared):
        first = self.drawn(shared)
        shared.step([{"x": np.ones(1, np.float32)}])
        both = first + self.drawn(shared)
        assert len(set(both)) == len(both) == 2 * 3 * 3

    def test_schedule_and_limit_change_nothing(self, shared):
        found = []
        for schedule, limit in (("gpipe", None), ("1f1b", None), ("bf", 1), ("bf", 3)):
            shared.schedule, shared._limit = rrfp.schedules.by_name(schedule), limit
            found.append(self.drawn(shared))
        assert all(numbers == found[0] for numbers in found)

    def test_seeds_draw_differently_and_repeat(self):
        seven, again, eight = (self.drawn(self.trainer(seed=seed)) for seed in (7, 7, 8))
        assert seven == again
        assert not set(seven) & set(eight)


def test_dropout_of_flax_modules_takes_the_key():
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, carry, mb):
            return self.dropout(self.linear(mb["x"]), rngs=nnx.Rngs(mb.key))

    class LinenDropping(linen.Module):
        @linen.compact
        def __call__(self, carry, mb):
            return linen.Dropout(0.5, deterministic=False)(linen.Dense(WIDTH)(carry))

    def loss(carry, mb):
        return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])

    pipe = rrfp.Pipeline([rrfp.layer(Dropping), rrfp.layer(LinenDropping)], loss)
    batch = [{"x": np.ones((4, WIDTH), np.float32)}] * 2
    trainer = toy.trainer(2, pipe=pipe, optimizer=optax.sgd(0.0), data=batch)
    assert trainer.check().ok
    assert len({report.loss for report in trainer.steps(3)}) == 3


class TestResiduals:
    """bfloat16 layers of float32 weights: what is made from weights alone is made once a step."""

    @pytest.fixture(scope="class")
    def trainer(self):
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
            inner = jnp.tanh(carry @ params["w"][0].astype(jnp.bfloat16)) + mb["x"].astype(jnp.bfloat16)
            return jnp.tanh(inner @ params["w"][1].astype(jnp.bfloat16))

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

    def programs(self, trainer):
        (compiled,) = trainer._engine._compiled.values()
        return compiled.train[1:]

    def test_no_weight_is_saved_per_microbatch(self, trainer):
        weight_bytes = 2 * WEIGHT * WEIGHT  # of the smallest thing made from weights: one bfloat16 matrix
        activation_bytes = 2 * WEIGHT  # a microbatch has one row
        for program, stage in zip(self.programs(trainer), trainer.start()[1:], strict=True):
            saved = [var.aval for var in program.traced.forward.closed.jaxpr.outvars]
            assert all(aval.shape[-2:] != (WEIGHT, WEIGHT) for aval in saved)
            assert stage.held_bytes == program.held_bytes < weight_bytes
            assert program.held_bytes >= activation_bytes  # so this is no empty claim

    def test_casts_of_scanned_weights_are_prepared(self, trainer):
        for program in self.programs(trainer)[:2]:
            prepared = [var.aval for var in program.traced.prepare.closed.jaxpr.outvars]
            assert [(a.shape[-3:], a.dtype) for a in prepared if a.shape[-3:] == (3, WEIGHT, WEIGHT)] == [
                ((3, WEIGHT, WEIGHT), jnp.bfloat16)
            ]

    def test_a_checkpointed_layer_saves_its_inputs_only(self, trainer):
        program = self.programs(trainer)[2]
        assert program.held_bytes <= (2 + 4 + 4) * WEIGHT  # carry, field, what the loss squares

    def test_gradients_are_right(self, trainer):
        report = trainer.check()
        assert report.loss_error <= 1e-2 and report.worst[1] <= 3e-2  # bfloat16 has 8 bits
        assert len(report.leaf_errors) == 3
        gradient = trainer.value_and_grad(trainer._data._source)[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "carried",
    [
        lambda x: (x, None, {"i": jnp.arange(3), "m": x > 0, "u": x.astype(jnp.uint8)}),
        lambda x: {"late": 2 * x, "early": [x, jnp.zeros((2, 0))], "whole": x[0]},
        lambda x: {"i": x.astype(jnp.int32)},
        lambda x: None,
    ],
    ids=["integers-and-none", "nested", "integers-only", "none"],
)
def test_any_pytree_is_carried_between_stages(carried):
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

    pipe = rrfp.Pipeline([rrfp.layer(first, init=init), rrfp.layer(last, init=init)], loss)
    batch = [{"x": np.full(2, 5.0, np.float32)}] * 2
    assert toy.trainer(2, pipe=pipe, data=batch).check().ok


class TestInitialValues:
    @staticmethod
    def trainer(init):
        pipe = rrfp.Pipeline(
            [
                rrfp.layer(tokens_only),
                rrfp.layer(Table, toy.VOCABULARY),
                rrfp.layer(waves, 2),
                rrfp.layer(head, init=head_init),
            ],
            toy.loss,
        )
        trainer = toy.trainer(2, pipe=pipe, init=init, data=toy.microbatches(1))
        trainer.start()
        return trainer

    @pytest.fixture(scope="class")
    def own(self):
        return jax.device_get(self.trainer(None).params)

    def test_some_are_given(self, own):
        asked = {}

        def init(path, spec):
            asked[path] = (spec.shape, spec.dtype)
            return np.full(spec.shape, 7, spec.dtype) if path == "2.scales.1" else None

        params = jax.device_get(self.trainer(init).params)
        assert asked == {
            "1.rows": ((toy.VOCABULARY, WIDTH), np.float32),
            "2.scales.0": ((WIDTH,), np.float32),
            "2.scales.1": ((WIDTH,), np.float32),
            "3.out": ((WIDTH, toy.VOCABULARY), np.float32),
        }
        assert (params["2"]["scales"].pop(1) == 7).all()
        own["2"]["scales"].pop(1)
        assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(own)))

    def test_all_are_given_and_no_layer_is_run_for_its_own(self, monkeypatch):
        monkeypatch.setattr(rrfp.Pipeline, "init_layer", lambda *args: pytest.fail("initialised a layer"))
        params = self.trainer(lambda path, spec: jnp.full(spec.shape, len(path), spec.dtype)).params
        assert float(params["1"]["rows"][0, 0]) == len("1.rows")
        assert {float(leaf[0]) for leaf in jax.tree.leaves(params["2"])} == {len("2.scales.0")}

    @pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros(WIDTH, np.float16), [0.0] * WIDTH])
    def test_a_wrong_one_is_refused(self, wrong):
        with pytest.raises(rrfp.UsageError, match=r"init\('2.scales.0'\).*float32\[4\]"):
            self.trainer(lambda path, spec: wrong if path == "2.scales.0" else None)
