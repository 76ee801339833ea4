"""Part 4: steps of one model under settings that change its programs, in turns, and the bytes of the device.

memory    of the first Trainer, while it is alone: the bytes that its ledgers and reports foresee, and the
          most that the allocator had in use (not on CPUs, which do not count)
steps     by model: seconds until a Trainer is ready and of its first step, by setting; medians of later ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.gpu.check import Findings
from configs.decoders import RandomTokens
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.data.contract import load_step

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "8 layers a program": {"layers_per_program": 8},
    "equal schedules": {"equal_schedules": True},
}
STAGES, MICROBATCHES = 4, 8


@dataclass(frozen=True)
class Case:
    """A model, and a microbatch of one sequence of so many tokens."""

    model: gpt.GPTConfig
    length: int

    def data(self) -> Sequence[Mapping[str, Any]]:
        """A step's microbatches, of random tokens."""
        return load_step(RandomTokens(self.model.vocab_size, (1, self.length), MICROBATCHES, seed=0), 0)

    def trainer(self, settings: Mapping[str, Any]) -> rrfp.Trainer:
        """Four stages that share the device."""
        pipe, mesh = pipeline(self.model), rrfp.Mesh(pp=STAGES, share_devices=True)
        given = rrfp.Settings(activation_budget=None, **settings)  # all are there at the same time
        return rrfp.Trainer(pipe, optax.adamw(1e-3), data=self.data(), mesh=mesh, settings=given)


def _gpt(layers: int, width: int) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        d_model=width,
        n_heads=width // 64,
        d_ff=11 * width // 4,
        n_layers=layers,
        vocab_size=8192,
        dtype=jnp.bfloat16,
    )


FULL = {
    "32 blocks, 512 wide, 512 tokens": Case(_gpt(32, 512), 512),
    "8 blocks, 2048 wide, 2048 tokens": Case(_gpt(8, 2048), 2048),
}
QUICK = {"tiny": Case(gpt.GPTConfig(d_model=16, n_heads=2, d_ff=32, n_layers=4, vocab_size=32), 8)}


def seconds_of_step(trainer: rrfp.Trainer, data: Sequence[Mapping[str, Any]]) -> float:
    """From the call to the end of the update."""
    began = perf_counter()
    trainer.step(data)
    jax.block_until_ready(trainer.stage_params)
    return perf_counter() - began


def memory(trainer: rrfp.Trainer, data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes foreseen, as if all stages held most at the same time, and found."""
    ledgers = trainer.start()
    held = sum(trainer.step(data).peak_bytes)
    loaded = sum(MICROBATCHES * ledger.largest.data_bytes for ledger in ledgers)
    found = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "stays": sum(ledger.fixed_bytes for ledger in ledgers),
        "data": loaded,
        "held_for_microbatches": held,
        "most_in_use": found,
    }


def measured(case: Case, rounds: int, figures: dict[str, Any], alone: bool) -> None:
    """Fill in the figures of a model, of memory too if no other Trainer has used the device."""
    trainers, data = dict[str, rrfp.Trainer](), case.data()
    for name, settings in SETTINGS.items():
        began = perf_counter()
        trainer = trainers[name] = case.trainer(settings)
        trainer.start()
        ready = round(perf_counter() - began, 2)
        figures[name] = {"ready_s": ready, "first_step_s": round(seconds_of_step(trainer, data), 3)}
        if alone and not settings:
            figures["memory"] = memory(trainer, data)
    rows = [[seconds_of_step(trainer, data) for trainer in trainers.values()] for _ in range(rounds + 1)]
    for name, own in zip(trainers, np.transpose(rows[1:]), strict=True):
        low, median, high = (round(1e3 * float(part), 2) for part in np.quantile(own, (0.25, 0.5, 0.75)))
        figures[name] |= {"step_ms": median, "quartiles_ms": [low, high]}


def measure(found: Findings) -> None:
    cases, rounds = (QUICK, 2) if found.quick else (FULL, 15)
    for number, (title, case) in enumerate(cases.items()):
        with found.section(title) as figures:
            measured(case, rounds, figures, alone=not number)
            ratio = figures["8 layers a program"]["step_ms"] / figures["default"]["step_ms"]
            found.headline += f"{title}: 8 layers a program take {ratio:.2f} of the default's time; "
