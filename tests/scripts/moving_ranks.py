"""One rank of runs whose layers move between steps. Writes moving-<rank>.json: by case, what was found.

moving_ranks.py FOLDER [CASE ...]
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import rrfp_jax as rrfp
from tests.support import decided_moves, sharded, toy

BATCH = toy.microbatches(4)

CASES = {
    "tied, by sockets": ({"transport": "socket", "pipe": toy.tied_pipeline()}, [5, 1, 1, 1], [1, 1, 1, 5]),
    "tied": ({"pipe": toy.tied_pipeline()}, [5, 1, 1, 1], [2, 1, 1, 4]),
    "spread": ({"mesh": rrfp.Mesh(pp=2, tp=2), "pipe": sharded.pipeline()}, [4, 4], [2, 6]),
    "replicas": ({"mesh": rrfp.Mesh(pp=2, dp=2, shard_optimizer=True)}, [4, 4], [6, 2]),
}


def equal(one, other):
    parts = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(np.array_equal(a.data, b.data) for a, b in parts)


BY_THEMSELVES = "by themselves"
BEFORE, AFTER = [2, 2, 2, 2], [1, 2, 2, 3]
"""The split before layers move, and after that: a stage on each process."""


def by_themselves():
    """Splits and losses by step of a run whose layers move once, when all ranks have compiled."""
    decided_moves.decide_always_for(BEFORE, AFTER)
    trainer = toy.trainer(len(BEFORE), data=BATCH, split=BEFORE, rebalance="auto")
    found = []
    for report in trainer.steps(400):
        found.append([trainer.split, report.loss])
        if [split for split, _ in found[-2:]] == [AFTER] * 2:
            break
        time.sleep(0.05)
    return found


def main(folder: Path, *names: str) -> None:
    found = {}
    for name in names or (*CASES, BY_THEMSELVES):
        if name == BY_THEMSELVES:
            found[name] = by_themselves()
            continue
        settings, first, later = CASES[name]
        moved, restored = (toy.trainer(4, data=BATCH, split=s, **settings) for s in (first, later))
        list(moved.steps(2))
        moved.save(folder / name)
        moved.split = later
        restored.restore(folder / name)
        losses = [[report.loss for report in one.steps(2)] for one in (moved, restored)]
        pairs = zip(toy.arrays(moved), toy.arrays(restored), strict=True)
        found[name] = {"losses": losses, "equal": [equal(*pair) for pair in pairs]}
    (folder / f"moving-{os.environ['RRFP_RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
