"""Objects that other people wrote as layers: how they are called, taken apart, and given back."""

import dataclasses
import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rrfp_jax as rrfp
from tests.support import toy

WIDTH = 4
ROWS = {"x": np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)}
BATCH = [ROWS, {"x": 2 * ROWS["x"]}]


class Attended(nnx.Module):
    """Has a call of its own, and gives two things."""

    def __init__(self, width, *, rngs):
        self.inner = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, positions, x, mask=None):
        return positions, self.inner(x * mask)


class LinenAttended(linen.Module):
    width: int

    @linen.compact
    def __call__(self, positions, x, mask=None):
        return positions, linen.Dense(self.width, name="inner")(x * mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    """As Equinox makes them: a pytree of arrays and functions."""

    kernels: list
    table: jax.Array
    activation: object

    @classmethod
    def make(cls, key):
        keys = jax.random.split(key, 2)
        return cls([jax.random.normal(k, (WIDTH, WIDTH)) for k in keys], jnp.arange(WIDTH), jnp.tanh)

    def __call__(self, x):
        for kernel in self.kernels:
            x = self.activation(x @ kernel + self.table)
        return x


class Flagged(Attended):
    def __call__(self, x, on=False):
        return self.inner(x)


class Worded(nnx.Module):
    """Has keywords that `rrfp.layer` has, too."""

    def __init__(self, width, *, split=None, make="a", init=abs, call="b", rngs, **others):
        given = (split, make, init(-1), call, others)
        self.inner = nnx.Linear(width, width, use_bias=given != (4, None, -2, "x", {"combine": 3}), rngs=rngs)

    def __call__(self, x, mb):
        return self.inner(x)


class Hidden(nnx.Module):
    """Keeps an array where it is no attribute."""

    def __init__(self, hide):
        self.act = hide(jnp.arange(WIDTH) * 2)

    def __call__(self, x, mb):
        return self.act(x)


HIDDEN = {
    "closure": lambda array: lambda x, mb=None: x * array,
    "partial": lambda array: functools.partial(lambda array, x, mb=None: x * array, array),
    "jit": lambda array: jax.jit(lambda x, mb=None: x * array),
}


@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize(
    "layer",
    [
        lambda hide: rrfp.layer(Hidden, hide),
        lambda hide: rrfp.layer(make=lambda key: hide(jnp.arange(WIDTH) * 2)),
    ],
    ids=["nnx", "make"],
)
def test_arrays_that_nobody_finds_are_refused(layer, hide):
    pipe = rrfp.Pipeline([rrfp.layer(first), layer(HIDDEN[hide])], loss)
    said = r"layer 1 .*: keeps an array, int32\[4\], in a function .* or compute it with NumPy"
    with pytest.raises(rrfp.UsageError, match=said):
        pipe.shapes({"x": jax.ShapeDtypeStruct((2, WIDTH), np.float32)})


class Renamed(nnx.Module):
    def __call__(self, x, batch):
        return x.reshape(batch.shape)


def kernels_alone(affine):
    return {"first": affine.kernels[0], "second": affine.kernels[1]}, affine


def with_kernels(params, affine):
    return dataclasses.replace(affine, kernels=[params["first"], params["second"]])


def loss(carry, mb):
    return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])


def first(carry, mb):
    return mb["x"]


def attend(module, x, mb):
    return module(None, x, mask=2.0)[1]


def apply(affine, x, mb):
    return affine(x)


def drawn(params, x, mb):
    return x @ params["w"]


def drawn_init(key, x, mb):
    return {"w": jax.random.normal(key, (x.shape[-1], mb["x"].shape[-1]))}


DENSE = ["inner.bias", "inner.kernel"]
KERNELS = ["kernels.0", "kernels.1", "table"]
NAMED = {"split": kernels_alone, "combine": with_kernels}

LAYERS = {  # a layer, the paths of its parameters, those that are constants, how its object is called
    "nnx": (rrfp.layer(Attended, WIDTH, call=attend), DENSE, [], attend),
    "linen": (rrfp.layer(LinenAttended, WIDTH, call=attend), DENSE, [], attend),
    "linen module": (rrfp.layer(LinenAttended(WIDTH), call=attend), DENSE, [], attend),
    "pytree": (rrfp.layer(make=Affine.make, call=apply), KERNELS, ["table"], apply),
    "split": (
        rrfp.layer(make=Affine.make, call=apply, **NAMED),
        ["first", "kernels.0", "kernels.1", "second", "table"],
        KERNELS,
        apply,
    ),
    "init of the carry": (rrfp.layer(drawn, init=drawn_init), ["w"], [], lambda own, x, mb: own(x, mb)),
}


def test_numpy_arrays_of_an_object_are_constants_as_the_documentation_says():
    layer = rrfp.layer(make=lambda key: {"w": jnp.ones(2), "b": np.ones(2, np.float32)})
    params = layer.init(jax.random.key(0), None, None)
    assert [*params] == ["w"] and isinstance(layer.fill(params)["b"], np.ndarray)


@pytest.mark.parametrize("kind", LAYERS)
def test_it_trains_as_plain_jax_and_comes_back_as_it_is(kind):
    layer, paths, constants, call = LAYERS[kind]
    layers = [rrfp.layer(first), layer, rrfp.layer(Attended, WIDTH, call=attend)]
    trainer = toy.trainer(2, pipe=rrfp.Pipeline(layers, loss), data=BATCH)
    trainer.start()
    before = jax.device_get(trainer.stage_params["1"])
    assert trainer.check().ok
    trainer.step(BATCH)
    after = jax.device_get(trainer.stage_params["1"])
    flat = {path: (a, b) for (path, a), b in zip(named(before), jax.tree.leaves(after), strict=True)}
    assert list(flat) == paths
    assert [path for path, (a, b) in flat.items() if np.array_equal(a, b)] == constants
    _, own, last = trainer.params(modules=True)
    out = attend(last, call(own, jnp.asarray(ROWS["x"]), rrfp.EvaluationBatch(ROWS)), None)
    evaluated = trainer.evaluate([ROWS]).loss
    assert float((out**2).sum() / len(out)) == pytest.approx(evaluated, rel=1e-6)


def named(tree):
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


class AtSign(linen.Module):
    @linen.compact
    def __call__(self, x, mb):
        scale, shift = (self.param(name, linen.initializers.ones, (WIDTH,)) for name in ("@scale", "shift"))
        return x * scale + shift + self.variable("table", "@scale", lambda: jnp.ones(WIDTH)).value


def carried(carry, mb=None):
    return mb["x"] if mb else carry


def rows(module, x, mb):
    return x @ module["w"][0] + module["table"]


def listed(key):
    return {"w": [jax.random.normal(key, (WIDTH, WIDTH))], "table": jnp.arange(WIDTH)}


WORDS = {"split": 4, "make": None, "init": lambda x: 2 * x, "call": "x", "combine": 3}
LISTED = rrfp.layer(
    make=listed,
    call=rows,
    split=lambda made: (made["w"], {"table": made["table"]}),
    combine=lambda params, static: {"w": params, **static},
)


@pytest.mark.parametrize(
    ("layer", "paths"),
    [
        (rrfp.layer(carried), []),
        (LISTED, ["0", "table"]),
        (rrfp.layer(Worded, WIDTH, **WORDS), ["inner.kernel"]),
        (rrfp.layer(lambda rngs, **own: Worded(WIDTH, rngs=rngs, **own), **WORDS), ["inner.kernel"]),
        (rrfp.layer(AtSign), ["@params.@scale", "@table.@scale", "shift"]),
    ],
    ids=["whether there is a microbatch", "a list, and a dict", "keywords", "keywords of a function", "@"],
)
def test_it_trains(layer, paths):
    layers = [rrfp.layer(first), layer, rrfp.layer(Attended, WIDTH, call=attend)]
    trainer = toy.trainer(2, pipe=rrfp.Pipeline(layers, loss), data=BATCH)
    trainer.step(BATCH)
    assert [path for path, _ in named(trainer.stage_params["1"])] == paths


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rrfp.layer(Attended, call=3), "call=3): give a function call(module, carry, mb)"),
        (lambda: rrfp.layer(make=3), "make=3): give a function of a random key"),
        (lambda: rrfp.layer(drawn, call=attend), "call= is for modules of flax and for make="),
        (lambda: rrfp.layer(Attended, WIDTH, split=kernels_alone), "split= and combine= are for make="),
        (lambda: rrfp.layer(Attended, make=Affine.make), "make= stands instead of a class or function"),
        (lambda: rrfp.layer(make=Affine.make, split=lambda m: m), "split= gives Affine(kernels"),
        (
            lambda: rrfp.layer(make=Affine.make, split=lambda m: ({"f": m.activation}, m)),
            "split= gives params with f = <PjitFunction",
        ),
        (
            lambda: rrfp.layer(make=Affine.make, split=lambda m: ({"table": m.table}, m)),
            "two arrays have the name 'table': have split= return dicts with other keys",
        ),
        (
            lambda: rrfp.layer(Attended, WIDTH, call=lambda module, x: module(x)),
            "must take (module, carry, mb); add mb",
        ),
        (lambda: rrfp.layer(Attended, WIDTH), "it was called as module(carry, mb): if it takes"),
        (
            lambda: rrfp.layer(nnx.BatchNorm, WIDTH),
            "takes use_running_average: Optional[bool] = None as its second argument; it was called as",
        ),
        (lambda: rrfp.layer(Flagged, WIDTH), "takes on=False as its second argument; it was called as"),
        (lambda: rrfp.layer(Renamed), "has no attribute 'shape'; it was called as module(carry, mb)"),
    ],
)
def test_what_does_not_fit_is_said(make, said):
    with pytest.raises(rrfp.UsageError) as refused:
        pipe = rrfp.Pipeline([rrfp.layer(first), make()], loss)
        pipe.shapes({"x": jax.ShapeDtypeStruct((2, WIDTH), np.float32)})
    assert said in str(refused.value)


class Huge(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (10**7, 10**7)))
        self.table = jnp.zeros((10**7, 10**7))

    def __call__(self, x, mb):
        return x + self.w[0, 0] + self.table[0, 0]


@pytest.mark.parametrize(
    "huge",
    [
        rrfp.layer(Huge),
        rrfp.layer(
            make=lambda key: {"w": jax.random.normal(key, (10**7, 10**7)), "t": jnp.arange(10**12)},
            call=lambda own, x, mb: x + own["w"][0, 0] + own["t"][0],
        ),
    ],
)
def test_nothing_is_allocated_before_a_stage_needs_it(huge):
    pipe = rrfp.Pipeline([rrfp.layer(first), huge, huge], loss)
    shapes = pipe.shapes({"x": jax.ShapeDtypeStruct((2, WIDTH), np.float32)})
    assert shapes[1].traced is shapes[2].traced  # repeats are traced, and compiled, once
    assert len(pipe.constants({"1": shapes[1].params})) == 1
