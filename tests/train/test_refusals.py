"""What a Trainer refuses: settings, parameters, and data."""

from contextlib import nullcontext
from functools import partial

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.core.orders import GPipe
from rrfp_jax.core.tasks import Placement
from rrfp_jax.data.contract import InMemory
from rrfp_jax.runtime.model.roles import layers_of_chunks
from tests.support import toy
from tests.support.refusals import BATCH, copied, make, refused, same


def without(name):
    return [{k: v for k, v in mb.items() if k != name} for mb in BATCH]


@pytest.mark.usefixtures("nothing_compiles")
class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"stages": 0}, ["pp=0", "at least one stage"]),
            ({"stages": 5}, ["pp=5", "needs 5 devices", "has 4 (cpu)", "share_devices=True"]),
            ({"remat": "all"}, ["remat='all'", "full", "dots_saveable"]),
            ({"split": (3, 3)}, ["split=[3, 3]", "2 positive whole numbers", "add up to 8"]),
            ({"split": (8, 0)}, ["split=[8, 0]", "2 positive whole numbers", "add up to 8"]),
            ({"split": (2, 2, 4)}, ["split=[2, 2, 4]", "2 positive whole numbers"]),
            ({"schedule": "zb"}, ["schedule='zb'", "no such schedule", "1f1b, b-priority, bf"]),
            ({"schedule": rrfp.schedules.BF}, ["schedule=", "BF()"]),
            ({"max_in_flight": 0}, ["max_in_flight=0", "one microbatch"]),
            ({"spare_gradients": -1}, ["spare_gradients=-1", "negative"]),
            ({"accumulation": "sum"}, ["accumulation='sum'", "'index' or 'arrival'"]),
            ({"clip_norm": 0.0}, ["clip_norm=0.0", "above 0", "leave it out"]),
            ({"on_nonfinite": "warn"}, ["on_nonfinite='warn'", "'stop' or 'skip'"]),
            ({"seed": -1}, ["seed=-1", "from 0 to"]),
            ({"seed": "1"}, ["seed='1'", "whole number"]),
            ({"split": (4.0, 4.0)}, ["split=[4.0, 4.0]", "2 positive whole numbers"]),
            ({"max_in_flight": "2"}, ["max_in_flight='2'", "whole number"]),
            ({"spare_gradients": 1.5}, ["spare_gradients=1.5", "whole number"]),
            ({"clip_norm": "1"}, ["clip_norm='1'", "above 0"]),
            ({"max_in_flight": True}, ["max_in_flight=True", "whole number"]),
            ({"spare_gradients": None}, ["spare_gradients=None", "whole number"]),
            ({"clip_norm": True}, ["clip_norm=True", "above 0"]),
            ({"stall_seconds": "x"}, ["stall_seconds='x'", "seconds above 0"]),
            ({"stall_seconds": True}, ["stall_seconds=True", "seconds above 0"]),
            ({"stall_seconds": 0}, ["stall_seconds=0", "seconds above 0"]),
            ({"stall_seconds": float("nan")}, ["stall_seconds=nan", "seconds above 0"]),
            ({"loss_scale": True}, ["loss_scale=True", "'dynamic'"]),
            ({"executables": True}, ["executables=True", "a folder", "or None"]),
            ({"executables": ""}, ["executables=''", "a folder", "or None"]),
            ({"init": 3}, ["init=3", "init(path, spec)"]),
            ({"on_step": 3}, ["on_step=3", "a step's report"]),
            ({"delays": "J1"}, ["delays='J1': give NAME=VALUE", "jitter=J2,skew=0.001"]),
            ({"settings": {"seed": 3}}, ["settings is of type dict, not rrfp.Settings"]),
            ({"seed": 3, "settings": rrfp.Settings(seed=4)}, ["seed=3 beside settings with seed=4"]),
            ({"mesh": 4}, ["mesh is of type int, not rrfp.Mesh"]),
            ({"mesh": rrfp.Mesh(pp=2, shape="v")}, ["shape='v'", "chunks=2"]),
            ({"mesh": rrfp.Mesh(pp=2, chunks=2), "schedule": "zb-v"}, ["got looped", "leave the number"]),
        ],
        ids=str,
    )
    def test_a_setting(self, settings, said):
        with refused(*said):
            make(**settings)

    def test_more_stages_than_layers(self):
        pipe = rrfp.Pipeline(toy.layers()[::2], toy.loss)
        with refused("3 stages for 2 layers", "each stage needs at least one", "at most 2"):
            make(3, pipe=pipe)
        with refused("2 stages for 1 layer: each stage needs at least one; use at most 1"):
            layers_of_chunks(1, Placement(2), None)
        with refused("2 chunks on each of 2 stages for 3 layers", "use at most 1 stage, or one chunk per"):
            layers_of_chunks(3, Placement(2, 2, "v"), None)
        with refused("2 chunks on each of 1 stage for 1 layer: each chunk", "use one chunk per stage, as"):
            layers_of_chunks(1, Placement(1, 2, "v"), None)

    def test_stages_may_share_devices(self):
        rrfp.Trainer(toy.pipeline(), optax.sgd(0.1), data=BATCH, mesh=rrfp.Mesh(pp=5, share_devices=True))

    def test_training_without_optimizer_or_data(self):
        with refused("no optimizer", "Trainer(pipe, optax."):
            make(optimizer=None).step(BATCH)
        with refused("no optimizer", "Trainer(pipe, optax."):
            next(make(optimizer=None).steps(1))
        with refused("steps() needs data", "data="):
            next(make(data=None).steps(1))

    @pytest.mark.parametrize("count", ["a", -1, 1.0, True, None])
    def test_a_number_of_steps_is_refused_before_the_first_is_asked_for(self, count):
        with refused(f"steps(count={count!r})", "whole number"):
            make().steps(count)

    @pytest.mark.parametrize("given", [3, "", None, __file__, "a\0b"])
    def test_no_folder_of_checkpoints(self, given):
        with refused("Trainer.restore", "give a folder" if given != "a\0b" else "cannot be printed"):
            make().restore(given)

    @pytest.mark.parametrize("step", ["1", -1, 0.5])
    def test_no_step_of_a_checkpoint(self, step, tmp_path):
        with refused(f"restore(step={step!r})", "whole number"):
            make().restore(tmp_path, step)

    def test_no_steps_of_evaluation(self):
        with refused("evaluate(steps=0)", "at least 1"):
            make().evaluate(BATCH, steps=0)


class Normed(linen.Module):
    @linen.compact
    def __call__(self, carry, mb):
        return linen.BatchNorm(use_running_average=False)(carry)


class Averaged(nnx.BatchNorm):
    def __init__(self, rngs):
        super().__init__(toy.WIDTH, rngs=rngs)

    def __call__(self, carry, mb):
        return super().__call__(carry)


class Counted(nnx.Module):
    """Counts its calls behind a transform of flax."""

    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))

    @nnx.jit
    def __call__(self, carry, mb):
        self.count[...] += 1
        return carry


class Changing(nnx.Module):
    """A parameter that is halved whenever the layer is called."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(toy.VOCABULARY))

    def __call__(self, carry, mb):
        self.scale[...] = self.scale[...] / 2
        return carry * self.scale[...]


@pytest.mark.usefixtures("nothing_compiles")
class TestLayers:
    @pytest.mark.parametrize(
        ("build", "said"),
        [
            (lambda: rrfp.layer(3), ["layer(int)", "got 3", "f(carry, mb)"]),
            (lambda: rrfp.layer(dict), ["layer(dict)", "f(carry, mb)"]),
            (lambda: rrfp.layer(toy.embed, 3), ["layer(embed)", "arguments", "functools.partial"]),
            (lambda: rrfp.layer(toy.embed, 3, init=toy.embed_init), ["layer(embed)", "functools.partial"]),
            (lambda: rrfp.layer(toy.embed, repeat=0), ["layer(embed, repeat=0)", "at least once"]),
            (
                lambda: rrfp.layer(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
                ["layer(Linear)", "already built", "with its class and arguments"],
            ),
            (lambda: rrfp.Pipeline([], toy.loss), ["no layers", "at least one rrfp.layer(...)"]),
            (lambda: rrfp.Pipeline([toy.embed], toy.loss), ["embed is no layer", "rrfp.layer(embed)"]),
            (lambda: rrfp.Pipeline(toy.layers()[0], toy.loss), ["embed", "list of layers"]),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_no_layer(self, build, said):
        with refused(*said):
            build()

    def test_random_keys_in_a_carry(self):
        layers = toy.layers()
        keyed = rrfp.layer(lambda carry, mb: {**carry, "key": mb.key})
        with refused("layer 1 (<lambda>)", "carry['key']", "key<fry>", "mb.key where it is used"):
            make(pipe=rrfp.Pipeline([layers[0], keyed, *layers[1:]], toy.loss))

    def test_carries_that_do_not_fit_name_both_layers(self):
        embed, block, head = toy.layers()
        with refused("layer 2 (block)", "layer 1 (head)", "float32[2, 8, 13]", "'x'"):
            make(pipe=rrfp.Pipeline([embed, head, block], toy.loss))
        with refused("layer 0 (block)", "None as carry and the fields {'labels': int32[2, 8], "):
            make(pipe=rrfp.Pipeline([block, head], toy.loss))
        with refused("the loss", "layer 1 (block)", "{'positions': int32[8], 'x': float32[2, 8, 16]}"):
            make(pipe=rrfp.Pipeline([embed, rrfp.layer(toy.block, init=toy.block_init)], toy.loss))

    def test_a_field_that_microbatches_lack(self):
        with refused("layer 0 (embed)", "mb['tokens']", "labels, mask"):
            make(data=without("tokens"))
        with refused("the loss", "mb['mask']", "labels, tokens"):
            make(data=without("mask"))

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            (Averaged, "mean"),
            (Counted, "count"),
            (Normed, "@batch_stats.BatchNorm_0.mean"),
        ],
    )
    def test_state_that_a_call_changes(self, module, name):
        first = rrfp.layer(lambda carry, mb: jnp.zeros((2, toy.WIDTH)))
        pipe = rrfp.Pipeline([first, rrfp.layer(module)], toy.loss)
        with refused(f"changes its variable {name} when it is called", "use_running_average", "LayerNorm"):
            make(pipe=pipe)

    def test_scales_that_gradients_replace(self):
        from flax.linen.fp8_ops import Fp8DotGeneral

        first = rrfp.layer(lambda carry, mb: jnp.zeros((2, toy.WIDTH)))
        dense = linen.Dense(toy.VOCABULARY, dot_general_cls=Fp8DotGeneral)
        pipe = rrfp.Pipeline([first, rrfp.layer(dense, call=lambda module, x, mb: module(x))], toy.loss)
        with refused("layer 1 (Dense)", "_overwrite_with_gradient", "dot_general_cls=None"):
            make(1, pipe=pipe)

    def test_a_parameter_that_is_changed_in_the_call(self):
        first = rrfp.layer(lambda carry, mb: jnp.zeros((2, 8, toy.VOCABULARY)))
        with refused(
            "layer 1 (Changing)", "changes its parameter scale", "only the optimizer", "local value"
        ):
            make(1, pipe=rrfp.Pipeline([first, rrfp.layer(Changing)], toy.loss))

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("a\n", r"params.1.a\n has a character that cannot be printed"),
            ("x" * 300, "has 309 bytes, of which a folder takes 255"),
        ],
    )
    def test_a_name_that_cannot_be_stored(self, name, said):
        def scaled(params, carry, mb):
            return carry * sum(jax.tree.leaves(params))

        def init(key):
            return {name: jnp.ones(())}

        first = rrfp.layer(lambda carry, mb: jnp.zeros((2, 8, toy.VOCABULARY)))
        with refused(said, "cannot be stored: rename the parameter"):
            make(pipe=rrfp.Pipeline([first, rrfp.layer(scaled, init=init)], toy.loss))


@pytest.mark.usefixtures("nothing_compiles")
class TestLoss:
    @pytest.mark.parametrize(
        ("loss", "said"),
        [
            (lambda c, mb: c.sum(), ["rrfp.Loss(sum, weight=count)"]),
            (toy.sums, ["tuple", "rrfp.Loss(sum, weight=count)"]),
            (lambda c, mb: rrfp.Loss(c.sum(-1)), ["total", "(2, 8)", ".sum()"]),
            (lambda c, mb: rrfp.Loss(c.sum(), weight=mb["mask"]), ["weight", "(2, 8)", ".sum()"]),
            (lambda c, mb: rrfp.Loss(c.sum(), metrics={"hits": c}), ["hits", "(2, 8, 13)", ".sum()"]),
        ],
        ids=["number", "tuple", "total", "weight", "metric"],
    )
    def test_no_scalar_sums(self, loss, said):
        with refused(*said):
            make(pipe=toy.pipeline(loss))

    @pytest.mark.parametrize(
        ("loss", "name"),
        [
            (lambda c, mb: rrfp.Loss((c**2).mean(), weight=mb["mask"].sum()), "Loss.total"),
            (lambda c, mb: rrfp.Loss((c**2).sum(), weight=mb["mask"].mean()), "Loss.weight"),
            (lambda c, mb: rrfp.Loss((c**2).sum(), weight=1.0), "Loss.weight"),
        ],
        ids=["total", "weight", "weight of 1"],
    )
    def test_means(self, loss, name):
        with refused("not a sum", name, "Return sums", "additive=False"):
            make(pipe=toy.pipeline(loss))
        make(pipe=toy.pipeline(loss, additive=False))

    @pytest.mark.parametrize(
        ("total", "accepted"),
        [
            (lambda rows, own: rows.sum() + 100 * own, True),
            (lambda rows, own: rows.mean() + 100 * own, False),
            *[(lambda rows, own: rows.mean() * own, False), (lambda rows, own: rows.mean() / own, False)],
        ],
    )
    def test_a_sum_that_the_carry_brings_along_is_accepted(self, total, accepted):
        def loss(carry, mb):
            return rrfp.Loss(total(carry[0] ** 2, carry[1]), weight=mb["mask"].sum())

        summed = rrfp.layer(lambda carry, mb: (carry, (carry**2).sum()))
        with nullcontext() if accepted else refused("not a sum", "Loss.total"):
            make(pipe=rrfp.Pipeline([*toy.layers(), summed], loss))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("a_scalar", np.float32(1)), ("z_classes", np.ones(toy.VOCABULARY)), ("z_rows", np.arange(2))],
    )
    def test_sums_are_accepted_whatever_other_fields_there_are(self, name, value):
        make(data=[{**mb, name: value} for mb in BATCH])

    def test_sums_of_rows_that_stand_in_one_dimension_are_accepted(self):
        def loss(carry, mb):
            return rrfp.Loss((carry * mb["mask"].reshape(-1, 1)).sum(), weight=mb["mask"].sum())

        flattened = rrfp.layer(lambda carry, mb: carry.reshape(-1, carry.shape[-1]))
        make(pipe=rrfp.Pipeline([*toy.layers(), flattened], loss))

    def test_sums_in_bfloat16_are_accepted(self):
        def loss(carry, mb):
            return rrfp.Loss((carry.astype(jnp.bfloat16) ** 2).sum(), weight=mb["mask"].sum())

        make(pipe=toy.pipeline(loss))

    def test_sums_in_bfloat16_that_nearly_cancel_are_accepted(self):
        def loss(carry, mb):
            total = mb["own"].astype(jnp.bfloat16).sum() + 0 * carry.sum().astype(jnp.bfloat16)
            return rrfp.Loss(total, weight=mb["mask"].sum())

        own = np.array([[1.0, 0.23], [-1.0, -0.2]], np.float32)
        make(pipe=toy.pipeline(loss), data=[{**mb, "own": own} for mb in BATCH])

    def test_sums_of_microbatches_of_several_shapes_are_accepted(self):
        make(data=[BATCH[0], *toy.microbatches(1, length=4), BATCH[1]])


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

    @pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
    def test_numbers_of_less_than_a_byte_are_no_parameters(self, dtype):
        layers = [rrfp.layer(toy.embed, init=lambda key: {**toy.embed_init(key), "q": jnp.ones(3, dtype)})]
        with refused(f"0.q is {dtype}", "int8", f".astype('{dtype}')"):
            make(pipe=rrfp.Pipeline([*layers, *toy.layers()[1:]], toy.loss, frozen="0.q"))

    def test_an_optimizer_that_couples_stages_through_what_is_frozen_is_accepted(self):
        coupled = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        make(2, optimizer=coupled, pipe=toy.pipeline(frozen=["0.*", "1.*", "2.*", "3.*"]))
        with refused("another stage"):
            make(2, optimizer=coupled, pipe=toy.pipeline(frozen=["0.*", "1.*", "2.*"]))


class Planned:
    """BATCH as an object with `plan` and `load`; from a step on, what it loads is changed."""

    def __init__(self, change=dict, step=0):
        self.change, self.step = change, step

    def plan(self, step):
        specs = [{k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in mb.items()} for mb in BATCH]
        return [rrfp.Microbatch(spec, source=(step, j)) for j, spec in enumerate(specs)]

    def load(self, microbatch, fields):
        step, j = microbatch.source
        arrays = {name: BATCH[j][name] for name in fields}
        return self.change(arrays) if step >= self.step else arrays


BROKEN_LOADS = [
    (lambda arrays: {k: v for k, v in arrays.items() if k != "labels"}, ["'labels'", "not loaded"]),
    (lambda arrays: {k: v[:, :7] for k, v in arrays.items()}, ["[2, 7]", "planned as", "[2, 8]"]),
    (lambda arrays: {k: v.astype(np.int16) for k, v in arrays.items()}, ["int16[2, 8]", "planned as"]),
]


class TestData:
    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            ([], ["0 microbatches", "at least one"]),
            (lambda step: [], ["step 0", "0 microbatches", "at least one"]),
            (3, ["data=", "plan(step)", "list of microbatches"]),
            (BATCH[0], ["data=", "list of microbatches"]),
            ([np.zeros(3)], ["dict of arrays"]),
            ([{}], ["dict of arrays", "at least one field"]),
            ([{"tokens": [["a"]]}], ["'tokens'", "<U1", "numbers"]),
            ([{"tokens": [[1], [1, 2]]}], ["'tokens'", "ragged"]),
        ],
        ids=["empty", "empty-step", "number", "dict", "array", "no-field", "text", "ragged"],
    )
    def test_no_microbatches(self, data, said):
        with refused(*said):
            make(data=data)

    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize("method", ["step", "value_and_grad", "evaluate"])
    @pytest.mark.parametrize("given", [[], [np.zeros(3)], BATCH[0]], ids=["none", "array", "dict"])
    def test_no_microbatches_given_to_a_method(self, method, given):
        with refused("microbatch"):
            getattr(make(data=None), method)(given)

    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize(("change", "said"), BROKEN_LOADS, ids=["missing", "shape", "dtype"])
    def test_a_load_that_does_not_keep_to_the_plan(self, change, said):
        with refused("step 0, microbatch 2", *said):
            make(data=Planned(change))

    @pytest.mark.parametrize(("change", "said"), BROKEN_LOADS, ids=["missing", "shape", "dtype"])
    def test_a_later_load_that_does_not(self, trainer, change, said):
        before = copied(trainer)
        trainer._data = Planned(change, step=trainer.steps_done)
        with refused(f"step {trainer.steps_done}, microbatch 0", *said):
            next(trainer.steps(1))
        assert same(trainer, before)
        trainer._data = Planned()
        next(trainer.steps(1))
        assert not same(trainer, before)

    def test_a_plan_of_specs_is_as_good_as_arrays(self, trainer):
        assert trainer.evaluate(Planned()) == trainer.evaluate(BATCH)


def one_of(field, **spec):
    """Three microbatches, of which number 1 has another array in a field."""
    own = BATCH[1][field]
    return [
        BATCH[0],
        BATCH[1] | {field: own.astype(spec["dtype"]) if "dtype" in spec else own[:, :-1]},
        BATCH[2],
    ]


@pytest.mark.usefixtures("nothing_compiles")
class TestAnOddMicrobatch:
    def test_another_dtype_in_a_step(self):
        with refused(
            "step 0: microbatch 1: its field 'tokens' is float32[2, 8], but int32 in microbatch 0; give a "
            "field one dtype everywhere: array.astype('int32')"
        ):
            make(data=one_of("tokens", dtype=np.float32))

    def test_a_shape_that_does_not_fit(self):
        with refused(
            "step 0: microbatch 1, with labels int32[2, 7], mask ", ", tokens int32[2, 8]: the loss"
        ):
            make(data=one_of("labels"))

    def test_a_dtype_that_no_layer_takes(self):
        with refused("layer 0 (embed) failed when it was called with", "'tokens': float32[2, 8]}"):
            make(data=[mb | {"tokens": mb["tokens"].astype(np.float32)} for mb in BATCH])


def test_another_dtype_in_a_later_step(trainer):
    trainer.step(BATCH)
    with refused("microbatch 0: its field 'labels' is int16[2, 8], but int32 in earlier steps"):
        trainer.step([mb | {"labels": mb["labels"].astype(np.int16)} for mb in BATCH])
    trainer.step(BATCH)


def test_dtypes_that_the_data_declares_are_taken(trainer):
    class Declared(InMemory):
        buckets = (BATCH[0], BATCH[0] | {"labels": BATCH[0]["labels"].astype(np.int16)})

    assert trainer.evaluate(Declared(one_of("labels", dtype=np.int16))).loss == trainer.evaluate(BATCH).loss


@pytest.mark.usefixtures("nothing_compiles")
class TestArguments:
    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (
                lambda: make(num_microbatches=4),
                "Trainer(num_microbatches=4): no such argument; a step has as many microbatches as ",
            ),
            (
                lambda: make(clip_nrom=1.0),
                "Trainer(clip_nrom=1.0): no such argument; did you mean clip_norm=?",
            ),
            (
                lambda: rrfp.Trainer(toy.pipeline(), on_nonfinite="skip"),
                "settings=rrfp.Settings(on_nonfinite=...)",
            ),
            (lambda: rrfp.Trainer(data=BATCH), "Trainer: give pipe, too: Trainer(pipe, optimizer, ...)"),
            (
                lambda: rrfp.Trainer(1, 2, 3),
                "=...); only pipe and optimizer need no name",
            ),
            (lambda: rrfp.Mesh(stages=4), "Mesh(stages=4): no such argument; stages are pp: Mesh(pp=4)"),
            (
                lambda: rrfp.Mesh(4),
                "Mesh: give arguments by name, such as Mesh(pp=...)",
            ),
            (lambda: rrfp.Settings(on_nonfinit="skip"), "did you mean on_nonfinite=?"),
            (lambda: rrfp.Pipeline([], loss_fn=toy.loss), "it is loss: Pipeline(layers, loss)"),
            (lambda: rrfp.Pipeline(toy.layers()), "Pipeline: give loss, too: Pipeline(layers, loss, ...)"),
        ],
    )
    def test_that_are_not_there(self, call, said):
        with refused(said):
            call()

    def test_an_error_inside_is_left_alone(self):
        class Odd(rrfp.Pipeline):
            def __init__(self):
                super().__init__(len(3), toy.loss)

        with pytest.raises(TypeError, match="has no len"):
            Odd()


class OnlyTwo(GPipe):
    """An order that lacks a task unless there are two microbatches."""

    def order(self, stage, placement, microbatches):
        return super().order(stage, placement, microbatches)[microbatches != 2 :]


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_an_order_that_misses_tasks_of_an_evaluation_is_refused_at_the_start():
    trainer = toy.trainer(2, schedule=OnlyTwo(), data=toy.microbatches(2))
    with pytest.raises(rrfp.UsageError, match="F0"):
        trainer.start(toy.microbatches(3))
