"""Two ranks save and restore together; each writes what it found to `checkpoint-<rank>.json`."""

import json
import sys
from pathlib import Path

import numpy as np

from rrfp_jax.checkpoint import saving
from rrfp_jax.checkpoint.format import RunState
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.join import join
from tests.support import stored
from tests.support.stored import full_for

folder = Path(sys.argv[1])
world = join()
said: list[str] = []
checkpoints = Checkpoints(folder / "checkpoints", world, keep=3, say=said.append)
layers = range(3) if world.rank == 0 else range(3, 4)


def save(step):
    checkpoints.save(RunState(step=step, seed=7), stored.leaves(layers, step))
    checkpoints.copied()
    checkpoints.advance(to_the_end=True)


def restore():
    found = checkpoints.restore(dict(stored.leaves(layers, 0)))
    own = dict(stored.leaves(layers, found.run.step))
    return found.run.step, all(np.array_equal(found.leaves[key], own[key]) for key in own)


for step in (10, 20):
    save(step)
write_leaf = saving.write_leaf
if world.rank == 1:  # its disk is full
    saving.write_leaf = full_for("params.3.up", write_leaf)
save(30)
strict = Checkpoints(folder / "elsewhere", world, on_error="stop")
strict.save(RunState(step=1), stored.leaves(layers, 1))
try:
    strict.advance(to_the_end=True)
    stopped = ""
except TrainingError as error:
    stopped = str(error)
saving.write_leaf = write_leaf
save(40)
world.gather("all is written", None)
if world.rank == 0:  # what only rank 1 reads
    with (folder / "checkpoints" / "40" / "params.3.up" / "0.0").open("r+b") as file:
        file.write(b"\xff")
world.gather("that is damaged", None)
step, equal = restore()
(folder / f"checkpoint-{world.rank}.json").write_text(
    json.dumps({"said": said, "stopped": stopped, "step": step, "equal": equal})
)
