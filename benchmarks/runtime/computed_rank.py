"""One of the two processes that `benchmarks.runtime.computed` starts; rank 0 writes the steps of all cases.

rrfp launch -n 2 -m benchmarks.runtime.computed_rank TRACE ROUNDS
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optax
from numpy.typing import NDArray

import rrfp_jax as rrfp
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.report.store import write_steps
from rrfp_jax.runtime.run.join import join
from rrfp_jax.trace.records import RecordedStep

RANKS, WARM_UP = 2, 1
"""Processes, one stage each; and rounds that do not count."""

MODEL = gpt.GPTConfig(d_model=128, n_heads=4, d_ff=384, n_layers=8, embed_scale=0.5)
ROWS, LENGTHS, SHARES = 2, (64, 128, 256), (0.35, 0.4, 0.25)
"""Sequences of a microbatch; their tokens, and how often a microbatch has so many."""


@dataclass(frozen=True)
class Layout:
    """What a trainer is made for.

    Attributes:
        split: layers of each virtual stage: one a stage, or two in a V.
        limit: most microbatches in flight under a hint; None for the usual.
    """

    split: tuple[int, ...]
    limit: int | None = None


PLAIN, FOLDED, OTHERWISE = Layout((5, 5)), Layout((3, 2, 2, 3)), Layout((6, 4), 3)


@dataclass(frozen=True)
class Case:
    """A schedule on so many microbatches."""

    schedule: str
    microbatches: int
    layout: Layout = PLAIN

    @property
    def name(self) -> str:
        """For tables and trace files."""
        split = "-".join(map(str, self.layout.split))
        other = f", split {split}, limit {self.layout.limit}" if self.layout.limit else ""
        return f"{self.schedule} {self.microbatches}{other}"


COMPARED = tuple(
    Case(name, count, layout)
    for count in (8, 16)
    for layout, names in ((PLAIN, ("1f1b", "bf", "bfw")), (FOLDED, ("zb-v", "ranked:zb-v")))
    for name in names
)
CASES = (*COMPARED, *(Case(name, 16, OTHERWISE) for name in ("bf", "bfw")))

Arrays = Mapping[str, NDArray[np.generic]]


def microbatches(count: int, number: int) -> list[Arrays]:
    """Random tokens of drawn lengths; equal ones for equal arguments. Every length occurs."""
    draw = random.Random(f"{count} {number}")
    lengths = [*LENGTHS, *draw.choices(LENGTHS, SHARES, k=count - len(LENGTHS))]
    draw.shuffle(lengths)
    tokens = np.random.default_rng((count, number))
    return [
        _microbatch(tokens.integers(MODEL.vocab_size, size=(ROWS, n + 1), dtype=np.int32)) for n in lengths
    ]


def _microbatch(tokens: NDArray[np.int32]) -> Arrays:
    mask = np.ones((ROWS, tokens.shape[1] - 1), np.float32)
    return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy(), "mask": mask}


def trainer_of(layout: Layout, schedule: str) -> rrfp.Trainer:
    """Of the model, for all schedules with this layout."""
    return rrfp.Trainer(
        pipeline(MODEL),
        optax.adamw(1e-3),
        mesh=rrfp.Mesh(pp=RANKS),
        schedule=schedule,
        split=layout.split,
        settings=rrfp.Settings(max_in_flight=layout.limit),
    )


def pin(core: int) -> None:
    """All threads that there are, and those that they will start, compute on one core."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def main(file: str, rounds: int) -> None:
    """All cases in turns, on the same microbatches in the same round; all ranks do the same."""
    cores = sorted(os.sched_getaffinity(0))
    pin(cores[int(os.environ["RRFP_RANK"]) % len(cores)])
    world = join()
    trainers: dict[Layout, rrfp.Trainer] = {}
    found: dict[str, list[RecordedStep]] = defaultdict(list)
    for number in range(-WARM_UP, rounds):
        for case in CASES:
            trainer = trainers.get(case.layout) or trainer_of(case.layout, case.schedule)
            trainers[case.layout] = trainer
            trainer.schedule = case.schedule
            data = microbatches(case.microbatches, number + WARM_UP)
            trainer.step(data)  # the first one after a change of the schedule begins late
            report = trainer.step(data)
            if number >= 0:
                found[case.name].append(report.recorded)
            if world.rank == 0:
                print(f"round {number}, {case.name}: {1e3 * report.step_seconds:.1f} ms", flush=True)
    if world.rank == 0:
        write_steps(file, found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
