"""One of the four processes that `benchmarks.runtime.saving` starts; rank 0 writes what it found.

rrfp launch -n 4 -m benchmarks.runtime.saving_rank FILE ROUNDS
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np
import optax

import rrfp_jax as rrfp
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.runtime.run.host_memory import lent_folder
from rrfp_jax.runtime.run.join import join

MODES = ("none", "waiting", "beside", "memory")
STEPS = 8
MODEL = gpt.GPTConfig(d_model=512, n_heads=8, d_ff=2048, n_layers=4)
MICROBATCHES, BATCH, LENGTH = 4, 2, 64


def block(
    trainer: rrfp.Trainer, batch: list[dict[str, np.ndarray]], folder: Path, memory: Path, mode: str
) -> float:
    """Seconds of a block of steps, and of what is saved in it: to disk once, to memory after each step."""
    began = perf_counter()
    if mode in ("waiting", "beside"):
        trainer.save(folder, keep=1, wait=mode == "waiting")
    for _ in range(STEPS):
        trainer.step(batch)
        if mode == "memory":
            trainer._hold(memory)
    trainer.finish_saving()
    return perf_counter() - began


def main(file: Path, rounds: int) -> None:
    """Blocks of all kinds in turn."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH, LENGTH + 1), dtype=np.int32)
    fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": np.ones((BATCH, LENGTH), np.float32)}
    batch = [fields] * MICROBATCHES
    trainer = rrfp.Trainer(pipeline(MODEL), optax.adamw(1e-4), data=batch, mesh=rrfp.Mesh(pp=4))
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as own, lent_folder() as lent:
        folder, memory = map(Path, join().gather("the folders", [own, str(lent)])[0])  # rank 0's
        for mode in MODES:  # to warm up
            block(trainer, batch, folder, memory, mode)
        for _ in range(rounds):
            for mode in MODES:
                found[mode].append(block(trainer, batch, folder, memory, mode))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        join().gather("the end of the measurement", None)
    if join().rank == 0:
        file.write_text(json.dumps({"seconds": found, "bytes": size}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
