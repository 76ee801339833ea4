"""What an odd model is, and how it is held against plain JAX."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from tests.odd_models import plain
from tests.support.parking import every_gradient_parked
from tests.support.toy import made

WIDTH, ROWS = 3, 2
FUSED, SPLIT = "bf", "bfw"

TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd:
    """A model of layers `(init or None, apply)`, what it is trained on, and what should come of it.

    Attributes:
        refused: texts that the refusal has; None if training must be that of plain JAX.
        may_not_train: whether layers may be refused that have no gradient in plain JAX either.
        steps: how many are trained, each held against plain JAX; 0 for the gradient alone.
    """

    layers: Sequence[tuple[Any, Callable[..., Any]]]
    loss: Callable[..., Any]
    batch: Sequence[Any] = ()
    refused: Sequence[str] | None = None
    tolerance: float = TOLERANCE
    optimizer: Any = None
    frozen: Sequence[str] = ()
    tied_to: Any = dataclasses.field(default_factory=dict)
    steps: int = 0
    settings: Any = dataclasses.field(default_factory=dict)
    additive: bool = False
    x64: bool = False
    may_not_train: bool = False

    def is_frozen(self, path):
        return any(fnmatchcase(path, pattern) for pattern in self.frozen)

    def pipeline(self):
        layers = []
        for init, apply in self.layers:
            if init is None:
                layers.append(rrfp.layer(lambda carry, mb, apply=apply: apply({}, carry, mb)))
            else:
                layers.append(rrfp.layer(apply, init=init))
        tied = {}
        for alias, owner in self.tied_to.items():
            tied.setdefault(owner, []).append(alias)
        return rrfp.Pipeline(layers, self.loss, additive=self.additive, frozen=self.frozen, tied=tied)


def differs(case, stages=2, remat="none", schedules=(FUSED, SPLIT)):
    """Hold a model against plain JAX; nothing if it agrees or is refused as it should be."""
    with jax.enable_x64(case.x64):
        _differs(case, stages, remat, schedules)


def _differs(case, stages, remat, schedules):
    if case.may_not_train and (silent := untrained(case, stages, remat)):
        for seed in range(3):
            _, gradient = plain.value_and_grad(case, initial(case, seed))
            lost = [path for path, leaf in gradient.items() if path.split(".")[0] in silent and leaf.any()]
            assert not lost, f"refused as if they had no gradient: {lost}"
        return
    if case.refused is not None:
        with pytest.raises(rrfp.UsageError) as caught:
            trainer_of(case, stages, remat).value_and_grad(case.batch)
        message = str(caught.value)
        missing = [text for text in case.refused if text not in message]
        assert not missing, f"the refusal does not say {missing}: {message}"
        assert "\n" not in message
        return
    trainer = trainer_of(case, stages, remat)
    trainer.start()
    params = jax.device_get(trainer.stage_params)
    local = jax.device_put(params, jax.local_devices()[0])
    value, gradient = plain.value_and_grad(case, local)
    if not np.isfinite(value):  # which a step says, and names the microbatch
        with pytest.raises(rrfp.TrainingError, match="loss of microbatch"):
            trainer.value_and_grad(case.batch)
        return
    for schedule in schedules:
        trainer.schedule = schedule
        found_value, found = trainer.value_and_grad(case.batch)
        where = f"{stages} stages, remat {remat}, {schedule}"
        close(found_value, value, case.tolerance, f"loss ({where})")
        found = dict(zip(*plain.flat(found)[:2], strict=True))
        for path, expected in gradient.items():
            close(found[path], expected, case.tolerance, f"gradient of {path} ({where})")
        with every_gradient_parked():
            parked = dict(zip(*plain.flat(trainer.value_and_grad(case.batch)[1])[:2], strict=True))
        for path, own in found.items():
            assert np.asarray(own).tobytes() == np.asarray(parked[path]).tobytes(), f"{path} parked ({where})"
    if case.steps:
        for _ in trainer.steps(case.steps):
            pass
        expected = plain.train(case, local, case.steps, case.optimizer or optax.sgd(0.1))
        for path, leaf in zip(*plain.flat(trainer.stage_params)[:2], strict=True):
            close(leaf, expected[path], case.tolerance, f"{path} after {case.steps} steps")


def untrained(case, stages, remat):
    """The layers that are refused since they would not train; none if the model is taken."""
    try:
        trainer_of(case, stages, remat).start()
    except rrfp.UsageError as error:
        said = re.findall(r"layers? ([-, 0-9]+) would not train", str(error))
        assert said, error
        spans = [part.partition("-") for own in said for part in own.split(", ")]
        return {str(i) for first, _, last in spans for i in range(int(first), int(last or first) + 1)}
    return set()


def initial(case, seed):
    keys = jax.random.split(jax.random.key(seed), len(case.layers))
    inits = [init or (lambda key: {}) for init, _ in case.layers]
    return {str(i): init(key) for i, (init, key) in enumerate(zip(inits, keys, strict=True))}


def trainer_of(case, stages, remat):
    return made(
        case.pipeline(),
        case.optimizer or optax.sgd(0.1),
        data=list(case.batch),
        mesh=rrfp.Mesh(pp=stages),
        remat=remat,
        schedule=FUSED,
        **case.settings,
    )


def close(found, expected, tolerance, what):
    """Within a share of the largest expected value; what is not finite must be so in both."""
    found, expected = (np.asarray(jax.device_get(x)) for x in (found, expected))
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    found, expected = found.astype(wide), expected.astype(wide)
    assert found.shape == expected.shape, what
    assert np.array_equal(np.isfinite(found), np.isfinite(expected)), f"{what}: {found} is not {expected}"
    finite = np.isfinite(expected)
    scale = np.abs(expected[finite]).max(initial=0.0)
    error = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    assert error <= tolerance * max(scale, 1e-3), f"{what}: {found} is not {expected}, error {error}"


# What most of them are made of.


def rows(count=3, seed=0, **more):
    """Microbatches of a few rows."""
    draw = np.random.default_rng(seed)
    return [
        {
            "x": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
            "y": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
            **{name: make(draw) for name, make in more.items()},
        }
        for _ in range(count)
    ]


def matrix(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5}


def enter(params, carry, mb):
    return mb["x"] @ params["w"]


def dense(params, carry, mb):
    return jnp.tanh(carry @ params["w"])


def squares(carry, mb):
    return rrfp.Loss(((carry - mb["y"]) ** 2).sum(), weight=carry.shape[0])


# Which of them are run, and how.

ALL = os.environ.get("RRFP_ODD_MODELS") == "all"
"""Whether every model is run, on every number of stages and with every kind of rematerialisation."""

RUNS = [(stages, remat) for remat in ("none", "full") for stages in (2, 4, 1)]


def held_against_plain_jax(cases, every=3):
    """A test of these cases; without `ALL`, of every third, each on one number of stages."""
    chosen = []
    for number, (name, case) in enumerate(cases):
        runs = RUNS if ALL else [RUNS[number // every % len(RUNS)]] if number % every == 0 else []
        if case.refused is not None and runs:
            runs = RUNS[:1]  # of several stages, which some are refused for
        chosen += [pytest.param(case, *run, id=f"{name}-{run[0]}-{run[1]}") for run in runs]

    @pytest.mark.parametrize(("case", "stages", "remat"), chosen)
    def test(case, stages, remat):
        differs(case, stages, remat)

    return test
