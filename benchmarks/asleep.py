"""Real steps whose programs sleep: is a step longer where tasks go ahead of their inputs?"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, say, table
from rrfp_jax.core.foresight import Dispatching
from rrfp_jax.errors import UsageError

STAGES, MICROBATCHES, FORWARD_SECONDS = 4, 16, 4e-3
SCHEDULES = ("bf", "bfw", "ranked:zb-v", "1f1b")
STRAGGLERS, TIMES_LONGER = 0.05, 5.0
LENGTHS = (0.5, 1.0, 2.0)
WIDTH = 4096
"""A program of fewer operations than a thousand XLA runs in the thread that calls it."""

WARM_STEPS, NOISE = 3, 0.01
"""Steps before any that counts; about how much a median of steps of the same kind differs from another."""


SOURCE = """
#include <chrono>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Sleep(ffi::Buffer<ffi::F32> seconds, ffi::ResultBuffer<ffi::F32> zero) {
  std::this_thread::sleep_for(std::chrono::duration<float>(seconds.typed_data()[0]));
  zero->typed_data()[0] = 0.0f;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    sleeping, Sleep, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""
"""Python's own callbacks would not do: JAX runs a program with one in the thread that calls it."""

NAME = "rrfp_asleep"


def _learn_to_sleep() -> None:
    """Compile and register the operation that sleeps; UsageError without a C++ compiler."""
    if (compiler := shutil.which("c++")) is None:
        raise UsageError("a C++ compiler, c++, is not there: install one, such as Debian's g++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "asleep.cc", Path(folder) / "asleep.so"
        source.write_text(SOURCE, encoding="ascii")
        options = ["-std=c++17", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
        subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
        operation = ctypes.cdll.LoadLibrary(str(library)).sleeping
    jax.ffi.register_ffi_target(NAME, jax.ffi.pycapsule(operation), platform="cpu")


def _asleep(seconds: Any) -> Any:
    """Zero, after so many seconds of sleep, in which a device is busy and no core is."""
    return jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct((), jnp.float32))(seconds)


@jax.custom_vjp
def _lasting(x: Any, forward: Any, backward: Any) -> Any:
    """`x`, whose computation and whose gradient take so many seconds."""
    return x + _asleep(forward)


def _forward(x: Any, forward: Any, backward: Any) -> tuple[Any, Any]:
    return _lasting(x, forward, backward), backward


def _backward(backward: Any, gradient: Any) -> tuple[Any, Any, Any]:
    zero = jnp.zeros((), jnp.float32)
    return gradient + _asleep(backward), zero, zero


_lasting.defvjp(_forward, _backward)


def _layer(number: int, chunks: int) -> Callable[..., Any]:
    """A layer that takes of a microbatch's `seconds` those of its stage; its weight's gradient is apart."""

    def layer(weight: Any, carry: Any, mb: Any) -> Any:
        forward, of_input, of_weight = mb["seconds"][number] / chunks
        x = mb["x"] if carry is None else carry
        return _lasting(x, forward, of_input) + _lasting(weight, jnp.float32(0), of_weight)

    return layer


def _loss(x: Any, mb: Any) -> rrfp.Loss:
    return rrfp.Loss((x**2).sum(), weight=x.size)


def _trainer(schedule: str, dispatch: Dispatching) -> rrfp.Trainer:
    chunks = 2 if schedule.endswith("zb-v") else 1
    layers = [
        rrfp.layer(_layer(min(number, 2 * STAGES - 1 - number), chunks), init=lambda key: jnp.ones(WIDTH))
        for number in range(STAGES * chunks)
    ]
    settings = rrfp.Settings(dispatch=dispatch, max_in_flight=2 * STAGES)
    mesh = rrfp.Mesh(pp=STAGES)
    return rrfp.Trainer(
        rrfp.Pipeline(layers, _loss), optax.sgd(1e-6), schedule=schedule, mesh=mesh, settings=settings
    )


Data = list[dict[str, Any]]


def _steps(kind: str, sigma: float) -> Iterator[Data]:
    """Steps whose tasks take log-normal times, by kind with stragglers or of three lengths, each a shape."""
    draw = random.Random(f"{kind} {sigma}")
    while True:
        step: Data = []
        for _ in range(MICROBATCHES):
            length = draw.choice(range(len(LENGTHS))) if kind == "three lengths" else 0
            factor = LENGTHS[length] if kind == "three lengths" else 1.0
            seconds = np.array(
                [[_drawn(draw, kind, sigma) * factor for _ in range(3)] for _ in range(STAGES)], np.float32
            )
            step.append({"x": np.ones((1 + length, WIDTH), np.float32), "seconds": seconds})
        yield step


def _drawn(draw: random.Random, kind: str, sigma: float) -> float:
    longer = TIMES_LONGER if kind == "stragglers" and draw.random() < STRAGGLERS else 1.0
    return FORWARD_SECONDS * longer * draw.lognormvariate(-sigma * sigma / 2, sigma)


def _ratio(kind: str, sigma: float, schedule: str, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step with "ready" and with "foreseen", in turns, and their median ratio."""
    trainers = [_trainer(schedule, dispatch) for dispatch in get_args(Dispatching)]
    took: list[list[float]] = []
    for number, data in zip(range(WARM_STEPS + steps), _steps(kind, sigma), strict=False):
        order: Sequence[int] = (0, 1) if number % 2 else (1, 0)
        found = {which: trainers[which].step(data).step_seconds for which in order}
        took.append([found[0], found[1]])
    ready, foreseen = zip(*took[WARM_STEPS:], strict=True)
    return median(ready), median(foreseen), median(f / r for f, r in zip(foreseen, ready, strict=True))


@bench(
    "Real programs that sleep for their time: is a step longer where inputs are foreseen?",
    minutes="6",
    aims='foreseen over "ready": at most 1.00, and 1 % for noise',
)
def asleep(steps: int = 9, schedule: tuple[str, ...] = SCHEDULES) -> Found:
    """Steps of 4 stages in one process with 16 microbatches; F, I and W take 4 ms in the mean, log-normal,
    half of that where a stage has two chunks. Programs sleep, by an operation in C++ that is compiled first:
    devices are busy and cores are not, and all else is as in training. Two Trainers that differ in
    `dispatch` take turns with equal data, so pairs of steps are compared. 5 % of the tasks take five
    times as long; microbatches have three lengths, each a shape of its own."""
    _learn_to_sleep()
    kinds = ("as estimated", "stragglers", "three lengths")
    rows, cells, aims = list[dict[str, Any]](), list[Sequence[object]](), list[Aim]()
    for kind, name, sigma in product(kinds, schedule, (0.1, 0.3)):
        ready, foreseen, ratio = _ratio(kind, sigma, name, steps)
        own = {"steps": kind, "schedule": name, "sigma": sigma}
        rows.append(own | {"ready": ready, "foreseen": foreseen, "ratio": ratio})
        cells.append([*own.values(), f"{1e3 * ready:.1f}", f"{1e3 * foreseen:.1f}", f"{ratio:.3f}"])
        aims.append(Aim(f"{kind}, {name}, sigma {sigma}", ratio, 1 + NOISE, ""))
        say(f"{kind}, {name}, sigma {sigma}: {ready:.4f} s ready, {foreseen:.4f} s foreseen, {ratio:.3f}")
    heads = ["steps", "schedule", "sigma", "ready, ms", "foreseen, ms", "foreseen over ready"]
    return Found(rows, aims, {"benchmarks.md asleep": table(heads, cells)})
