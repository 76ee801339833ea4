"""Part 2: four stages on the one device against unpipelined JAX, and schedules against each other.

float32, bfloat16   loss and gradient of a GPT of about 100 M parameters under 1F1B, BF and GPipe: the
                    worst leaf's max|g - reference| / max|reference|, the reference being one
                    `value_and_grad` per microbatch in the same precision (float32: highest)
bitwise             gradients of the schedules, and of the same schedule twice, with
                    accumulation="index"; where they differ, again in a process with
                    --xla_gpu_deterministic_ops=true, under which they must be equal
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rrfp_jax as rrfp
from benchmarks.gpu.check import Findings, Unavailable
from benchmarks.harness import on_ranks
from configs.decoders import RandomTokens
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.data.contract import load_step
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.train.reference import PlainStep, leaf_errors, relative

# Few wide blocks: as many parameters as twelve narrow ones, and a third to compile.
FULL = gpt.GPTConfig(d_model=1280, n_heads=20, d_ff=3456, n_layers=4, vocab_size=8192)
QUICK = gpt.GPTConfig(d_model=16, n_heads=2, d_ff=32, n_layers=2, vocab_size=32)
STAGES, MICROBATCHES = 4, 6
RUNS = ("1f1b", "bf", "bf", "gpipe")
"""Schedules, one of them twice."""

PRECISIONS: Mapping[str, tuple[Any, str | None, float]] = {
    "float32": (jnp.float32, "highest", 1e-4),
    "bfloat16": (jnp.bfloat16, None, 2e-2),
}
"""dtype of the computation, precision of float32 products, limit for the worst leaf."""

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class Case:
    """A trainer without optimizer, and its data."""

    trainer: rrfp.Trainer
    pipe: rrfp.Pipeline
    data: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, precision: str, quick: bool) -> Case:
        """Four stages that share the device. Sets JAX's precision of float32 products from here on."""
        dtype, products, _ = PRECISIONS[precision]
        jax.config.update("jax_default_matmul_precision", products)
        model = dataclasses.replace(QUICK if quick else FULL, dtype=dtype)
        pipe = pipeline(model)
        tokens = RandomTokens(model.vocab_size, (2, 8 if quick else 512), MICROBATCHES, seed=0)
        data = load_step(tokens, 0)
        mesh = rrfp.Mesh(pp=STAGES, share_devices=True)
        trainer = rrfp.Trainer(pipe, data=data, mesh=mesh)
        trainer.start()
        return cls(trainer, pipe, data)

    def gradients(self) -> list[tuple[str, float, Params]]:
        """(schedule, loss, gradient) of every run."""
        found = []
        for schedule in RUNS:
            self.trainer.schedule = schedule
            found.append((schedule, *self.trainer.value_and_grad(self.data)))
        return found


def differing(runs: Sequence[tuple[str, float, Params]]) -> dict[str, list[str]]:
    """Of every run but the first, the leaves whose bits are not those of the first run."""
    found = {}
    gradients = jax.device_get([gradient for _, _, gradient in runs])  # nothing to compile, and to tune
    first_name, first = runs[0][0], gradients[0]
    for number, ((name, _, _), gradient) in enumerate(zip(runs[1:], gradients[1:], strict=True), 1):
        equal = jax.tree.map(np.array_equal, first, gradient)
        leaves = jax.tree_util.tree_leaves_with_path(equal)
        found[f"{first_name} and {name} (run {number})"] = [
            jax.tree_util.keystr(path) for path, same in leaves if not same
        ]
    return found


def against_reference(case: Case, runs: Sequence[tuple[str, float, Params]]) -> dict[str, Any]:
    """Differences from unpipelined JAX by schedule: of the loss, and of the gradient of the worst leaf."""
    step = PlainStep(case.pipe, case.trainer.stage_params, case.data, (0, 0))
    expected_loss, expected = step.value_and_grad()
    found = {}
    for schedule, loss, gradient in runs:
        errors = leaf_errors(gradient, expected)
        worst = max(errors, key=errors.__getitem__)
        loss_error = relative(loss, expected_loss)
        found[schedule] = {"loss_error": loss_error, "leaf": worst, "leaf_error": errors[worst]}
    return found


def check(precision: str, quick: bool, figures: dict[str, Any]) -> dict[str, list[str]]:
    """Compare all runs in one precision with the reference and with each other; what differs among them."""
    began = perf_counter()
    case = Case.of(precision, quick)
    figures["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(case.trainer.stage_params))
    figures["start_s"] = round(perf_counter() - began, 1)
    runs = case.gradients()
    figures["limit"] = limit = PRECISIONS[precision][2]
    figures["schedules"] = found = against_reference(case, runs)
    figures["reference_s"] = round(perf_counter() - began, 1)
    for schedule, errors in found.items():
        if errors["leaf_error"] > limit:
            what = f"{schedule}: {errors['leaf']} is off by {errors['leaf_error']:.1e}"
            raise RuntimeError(f"{what}, limit {limit:g}")
    return differing(runs)


def differences(precisions: Sequence[str], quick: bool) -> dict[str, dict[str, list[str]]]:
    """What differs, by precision, in this process."""
    return {precision: differing(Case.of(precision, quick).gradients()) for precision in precisions}


def measure(found: Findings) -> None:
    unequal = {}
    for precision in PRECISIONS:
        with found.section(precision) as figures:
            unequal[precision] = check(precision, found.quick, figures)
            worst = max(errors["leaf_error"] for errors in figures["schedules"].values())
            found.headline += f"{precision} within {worst:.0e}; "
    with found.section("bitwise") as figures:
        if len(unequal) < len(PRECISIONS):
            raise Unavailable("without the gradients of both precisions there is nothing to compare")
        figures["leaves_that_differ"] = unequal
        suspects = [precision for precision, pairs in unequal.items() if any(pairs.values())]
        if not suspects:
            found.headline += "schedules equal to the bit"
            return
        found.headline += f"not equal to the bit without {DETERMINISTIC}: {', '.join(suspects)}"
        try:
            flags = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip()
            left, env = found.seconds_left, {"XLA_FLAGS": flags}
            again = on_ranks(0, differences, suspects, found.quick, seconds=left, env=env)
        except subprocess.TimeoutExpired:
            found.too_late(f"bits with {DETERMINISTIC}")
            return
        figures["leaves_that_differ_with_deterministic_ops"] = again
        if any(leaves for pairs in again.values() for leaves in pairs.values()):
            raise RuntimeError(f"schedules differ in some bits although {DETERMINISTIC}")
