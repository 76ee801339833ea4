"""One of four ranks that train. Writes `equal-<rank>.json` into a folder: by case and transport what it got.

Arguments: the folder, and cases as `dp:socket`.
"""

import json
import os
import sys
from pathlib import Path

import jax

import rrfp_jax as rrfp
from rrfp_jax.runtime.run.join import join
from tests.support.sharded import pipeline
from tests.support.transports_ranks import run

STEPS = 2
CASES = {  # in each all neighbours are on different nodes, if each rank is on a node of its own
    "pp": {"mesh": rrfp.Mesh(pp=4), "schedule": "bf"},
    "dp": {"mesh": rrfp.Mesh(pp=2, dp=2), "schedule": "bfw"},
    "tp": {"mesh": rrfp.Mesh(pp=2, tp=2), "schedule": "bfw", "pipe": pipeline()},
}


def in_hex(steps):
    """Losses and norms, to the bit."""
    return [[float.hex(each) for each in step] for step in steps]


def main(folder, *cases):
    jax.config.update("jax_num_cpu_devices", 1)
    join()
    found = {}
    for case in cases:
        name, transport = case.split(":")
        one = run(CASES[name], transport, STEPS)
        found[case] = [in_hex(one["steps"]), one["params"]]
    (folder / f"equal-{os.environ['RRFP_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
