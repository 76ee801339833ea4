"""One of four ranks that train by sockets, by NIXL and by mail. Writes transports-<rank>.json: all by case.

Arguments: the folder, the number of steps, and the names of cases; all of them if none is named.
"""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

import rrfp_jax as rrfp
from rrfp_jax.runtime.run.join import join
from tests.support import toy
from tests.support.no_mail import by_transport
from tests.support.sharded import pipeline

CASES = {
    "bf": {"mesh": rrfp.Mesh(pp=4), "schedule": "bf"},
    "bfw": {"mesh": rrfp.Mesh(pp=4), "schedule": "bfw"},
    "reserving": {"mesh": rrfp.Mesh(pp=4), "schedule": "ranked:zb-h2"},
    "chunks": {"mesh": rrfp.Mesh(pp=4, chunks=2, shape="v"), "schedule": "bfw"},
    "2x2x2": {"mesh": rrfp.Mesh(pp=2, tp=2, dp=2), "schedule": "bfw", "pipe": pipeline()},
    "widths": {"mesh": rrfp.Mesh(pp=3, tp=(2, 1, 1)), "schedule": "bfw", "pipe": pipeline()},
    "tied": {"mesh": rrfp.Mesh(pp=4), "schedule": "bf", "pipe": toy.tied_pipeline()},
}
TRANSPORTS = "socket", "nixl", "auto"


def main(folder, steps, *names):
    """Train each case by all; what they gave must be equal to the bit."""
    jax.config.update("jax_num_cpu_devices", 2)  # for 2x2x2
    found = {}
    for name in names or CASES:
        found[name] = {transport: run(CASES[name], transport, steps) for transport in TRANSPORTS}
    world = join()
    gc.collect()
    for _ in range(3):  # say that they have ended, hear it, and go
        world.gather("trainers to be gone", None)
    found["channels"] = len(world.mailbox._handlers)
    (folder / f"transports-{os.environ['RRFP_RANK']}.json").write_text(json.dumps(found))


def run(case, transport, steps):
    """A training and an evaluation: losses, norms, and the hash of all parameters here; "auto" mails."""
    by_transport(transport != "auto")
    trainer = toy.trainer(
        **case, transport=transport, max_in_flight=4, data=lambda step: toy.microbatches(8, seed=step)
    )
    reports = list(trainer.steps(steps))
    evaluated = trainer.evaluate(toy.microbatches(8, seed=99)).loss
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(trainer.stage_params):
        for shard in leaf.addressable_shards:
            hashed.update(np.asarray(shard.data).tobytes())
    return {
        "steps": [[r.loss, r.gradient_norm, r.parameter_norm] for r in reports],
        "evaluated": evaluated,
        "params": hashed.hexdigest(),
        "slots": [row.slot_bytes for row in trainer._engine.memory.ledgers()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
