"""Two ranks train, save, take the model out and put parameters in; each writes `taken-out-<rank>.json`."""

import json
import os
import sys
from pathlib import Path

import jax
import optax

import rrfp_jax as rrfp
from tests.support import zoo

folder = Path(sys.argv[1])


def made(mesh, optimizer=None, **kwargs):
    own = {"init": kwargs.pop("init", None), "executables": os.environ["RRFP_TEST_EXECUTABLES"]}
    return rrfp.Trainer(zoo.pipeline(**kwargs), optimizer, data=zoo.microbatches, mesh=mesh, **own)


rate = optax.linear_schedule(1e-2, 0.0, 10)
stages = made(rrfp.Mesh(pp=2), optax.inject_hyperparams(optax.adam)(rate), **zoo.FROZEN_AND_TIED)
reports = list(stages.steps(2))
stages.save(folder / "stages")

spread = made(rrfp.Mesh(pp=1, tp=2), optax.sgd(1e-2), **zoo.SPREAD)  # a stage of both processes
spread.restore(folder / "stages", params_only=True)
begun = zoo.digest(rrfp.export(spread))
list(spread.steps(1))
spread.save(folder / "spread")

theirs = rrfp.weights.orbax(folder / "theirs", lambda path: f"model.{path}")
ours = rrfp.weights.checkpoint(folder / "spread")


def some_of_each(path, spec):
    return (ours if path.startswith(("0", "3")) else theirs)(path, spec)


mixed = made(rrfp.Mesh(pp=2), init=some_of_each, **zoo.FROZEN_AND_TIED)
mixed.start()

found = {
    "stages": zoo.digest(rrfp.export(stages)),
    "restored": begun,
    "spread": zoo.digest(rrfp.export(spread)),
    "mixed": [zoo.digest(state) for state in rrfp.export(mixed)],
    "hyperparams": [dict(report.hyperparams) for report in reports],
    "steps": [report.step for report in spread.steps(1)],
}
(folder / f"taken-out-{jax.process_index()}.json").write_text(json.dumps(found))
