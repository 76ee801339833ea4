"""One rank of a parity run: every case of a world shape in one launch. Writes parity-<rank>.json.

parity_ranks.py FOLDER all|few
"""

import gc
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import rrfp_jax as rrfp
from tests.support import toy

CASES = [
    (rrfp.Mesh(pp=4, chunks=2), None, ("interleaved-1f1b", "bf", "bfw")),
    (rrfp.Mesh(pp=4, chunks=2, shape="v"), None, ("zb-v", "bf", "bfw")),
    (rrfp.Mesh(pp=4), [1, 4, 2, 1], ("gpipe", "1f1b", "zb-h1", "bfw", "bf")),
]
FEW = [(rrfp.Mesh(pp=2), [3, 5], ("1f1b", "bf"))]  # one stage a process; group_ranks.py has bfw


def main(folder: Path, cases: str) -> None:
    batch, stages = toy.microbatches(8), 4 if cases == "all" else 2
    found, expected = [], None
    for mesh, split, schedules in CASES if cases == "all" else FEW:
        trainer = toy.trainer(mesh=mesh, split=split, clip_norm=0.3)
        rank = trainer._world.rank
        first = None
        for schedule in schedules:
            trainer.schedule = schedule
            loss, gradient = trainer.value_and_grad(batch)
            if expected is None:
                expected = toy.reference(toy.initial_params(trainer), batch)
            first = first or jax.device_get(gradient)
            same = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), gradient, first)
            found.append(
                {
                    "case": f"{mesh} {split} {schedule}",
                    "layers": sorted(gradient),
                    "loss": loss,
                    "loss_error": abs(loss - float(expected[0])) / float(expected[0]),
                    "leaf_error": toy.worst_leaf(gradient, {k: expected[1][k] for k in gradient}),
                    "bitwise": all(jax.tree.leaves(same)),
                }
            )
    losses = [report.loss for report in trainer.steps(3)]
    evaluated, checked, wrong = trainer.evaluate(batch).loss, None, None
    if cases == "all":
        checked = trainer.check().ok
        swapped = toy.trainer(stages, pipe=toy.pipeline(mean_loss, additive=False))
        wrong = abs(swapped.value_and_grad(batch)[0] - float(expected[0])) / float(expected[0])
        del swapped
    trainer.split = [6 - stages, *[1] * (stages - 2), 4]  # layers move between processes
    losses += [report.loss for report in trainer.steps(2)]
    # Last, so that every process ends right after an update whose tied values others wait for.
    tied = toy.trainer(stages, pipe=toy.tied_pipeline(), clip_norm=0.3, on_nonfinite="skip")
    agrees = tied.check().ok
    reports = [*tied.steps(2), tied.step(with_nan(batch)), *tied.steps(2)]
    result = {"cases": found, "losses": losses, "evaluated": evaluated, "checked": checked, "wrong": wrong}
    result["tied"] = {
        "agrees": agrees,
        "steps": [[r.loss, r.gradient_norm, r.parameter_norm] for r in reports if r.applied],
        "skipped": [r.step for r in reports if not r.applied],
        "tables": [
            np.asarray(layer["table"]).tolist() for layer in tied.stage_params.values() if "table" in layer
        ],
    }
    gc.collect()
    result["channels"] = channels_left(trainer._world.mailbox)
    (folder / f"parity-{rank}.json").write_text(json.dumps(result))


def channels_left(mailbox):
    """How many are in use, once all processes have had time to say that they write nothing more."""
    until = time.monotonic() + 10.0
    while len(mailbox._handlers) > 3 and time.monotonic() < until:
        mailbox.sleep(0.05)
        mailbox.pump()
    return len(mailbox._handlers)


def with_nan(batch):
    """The batch with a loss that is not a number."""
    first = {**batch[0], "mask": batch[0]["mask"] * np.float32("nan")}
    return [first, *batch[1:]]


def mean_loss(logits, mb):
    """A mean of means, which the comparison has to catch."""
    total, weight = toy.sums(logits, mb)
    return rrfp.Loss(total / weight, weight=1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
