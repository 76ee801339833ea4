"""A rank of stages of several devices: `-m tests.support.group_ranks FOLDER MESH...`.

MESH: "PP TP[,TP...] DP [few|tied|whole|off]". Goes through one after the other in the same processes. Inputs
arrive at different times on every rank. On each mesh it goes through all ways to agree, with BF and BFW, and
through two with an order that reserves, two passes each over one batch, then trains two steps with the hint
that rank 0 chooses. Writes FOLDER/MESH/ranks-<rank>.json: by case, what the rank dispatched in each pass, the
loss, how far its gradients are from plain JAX, and their hash; then the losses of two steps, and which hints
were chosen. With "few" it goes through two ways, with BFW, in a pass each; with "tied" too, with a model
whose head is its embedding, or with "whole" one of which nothing is spread over devices: no collective
keeps ranks in step, and all but the first hear late of decisions; with "off" every rank decides for itself.
"""

import hashlib
import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from rrfp_jax.core.group import Alone
from rrfp_jax.core.schedules import name_of
from rrfp_jax.runtime.engine.engine import agreement_of
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.run import consensus as agreement
from rrfp_jax.schedules import Auto
from rrfp_jax.train.reference import PlainStep, leaf_errors
from tests.support import toy
from tests.support.sharded import pipeline

WAYS = [*itertools.product(("kv", "socket"), ("leader", "unanimous"))]
ENDS = WAYS[0], WAYS[-1]  # both carriers, both protocols
FEW = [(way, "bfw") for way in ENDS]
HINTS = "bf", "bfw", "ranked:zb-h2"
ALL = [*itertools.product(WAYS, HINTS[:2]), *((way, HINTS[-1]) for way in ENDS)]
PASSES = 2


def main(folder, size, word=""):
    """One mesh; `word` says what is special about it."""
    ways = FEW if word in ("few", "tied", "whole") else ALL
    tied = partial(toy.tied_pipeline, sharding={"*.table": P(None, "tp")})
    pipe = {"tied": tied, "whole": toy.pipeline}.get(word, pipeline)()
    pp, tp, dp = size.split()
    widths = [int(width) for width in tp.split(",")]
    mesh = rrfp.Mesh(pp=int(pp), tp=widths if len(widths) > 1 else widths[0], dp=int(dp))
    if max(widths) == 1:  # nobody to agree with
        ways = [(way, schedule) for way, schedule in ways if way == WAYS[0]]
    delays = Delays(skew=0.01, seed=1)
    trainer = toy.trainer(
        pipe=pipe,
        mesh=mesh,
        max_in_flight=4,
        delays=delays,
        data=lambda step: toy.microbatches(8, seed=step),
        schedule=Auto(candidates=HINTS[:2]),
    )
    predicted = name_of(trainer.schedule)
    trainer.start()
    driver, layout, batch, cases = trainer._engine.driver, trainer._engine.layout, toy.microbatches(8), {}
    params = toy.initial_params(trainer)
    if pipe.tied:
        expected, reference = PlainStep(pipe, params, batch, (0, 0)).value_and_grad()
    else:
        expected, reference = toy.reference(params, batch)
    for way, schedule in ways:
        driver.agreement = agreed = agreement_of(layout, *way)
        if word == "whole" and layout.member:
            agreed.hear = partial(after_a_while, agreed.hear)
        trainer._world.gather("everybody to have changed the terms", None)
        trainer.schedule = schedule
        count = 1 if word == "few" else PASSES
        passes = [one_pass(trainer, batch, float(expected), reference) for _ in range(count)]
        cases[f"{way[0]} {way[1]} {schedule}"] = passes
    if mesh.dp == 1:
        trainer.schedule = Auto(candidates=HINTS)
    found = {"cases": cases, "losses": [report.loss for report in trainer.steps(2)]}
    found["chosen"] = [predicted, name_of(trainer.schedule)]
    found["stages"] = trainer._world.membership.stages[trainer._world.rank]
    folder.mkdir(exist_ok=True)
    (folder / f"ranks-{trainer._world.rank}.json").write_text(json.dumps(found))


def after_a_while(hear):
    """Hear of what others have decided when they have run it."""
    time.sleep(0.02)
    return hear()


def one_pass(trainer, batch, expected, reference):
    """A pass over a batch, as plain data."""
    loss, gradient = trainer.value_and_grad(batch)
    shards = [shard.data for leaf in jax.tree.leaves(gradient) for shard in leaf.addressable_shards]
    agreed = trainer._engine.driver.agreement
    return {
        "order": [str(task) for task in agreed._order.latest] if agreed is not None else [],
        "loss": loss,
        "loss_error": abs(loss / expected - 1),
        "leaf_error": max(leaf_errors(gradient, reference).values()),
        "hash": hashlib.sha256(b"".join(np.asarray(shard).tobytes() for shard in shards)).hexdigest(),
    }


if __name__ == "__main__":
    for given in sys.argv[2:]:
        *size, word = given.split() if given[-1].isalpha() else [*given.split(), ""]
        if word == "off":
            agreement.member = lambda scheduler, *others: Alone(scheduler)
        main(Path(sys.argv[1]) / given, " ".join(size), word)
