"""One rank of stages of two whose inputs arrive at different times: `-m tests.group_ranks FOLDER [off]`.

Writes orders-<rank>.json: by case, what the rank dispatched in some passes over one batch, and their losses
and gradients; then the losses of two training steps. With "off" every rank decides for itself.
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np

import rrfp_jax as rrfp
from rrfp_jax.runtime import agreement
from rrfp_jax.runtime.agreement import Terms
from rrfp_jax.runtime.delays import Delays
from tests import toy

CASES = list(itertools.product(("kv", "socket"), ("leader", "unanimous"), ("bf", "bfw")))
PASSES = 3


def main(folder):
    trainer = toy.trainer(mesh=rrfp.Mesh(pp=2, tp=2), max_in_flight=4, delays=Delays(skew=0.01, seed=1))
    trainer.start()
    driver, batch, cases = trainer._engine.driver, toy.microbatches(6), {}
    for carrier, protocol, schedule in CASES:
        driver.agreement = trainer._layout.agreement(Terms(carrier=carrier, protocol=protocol))
        trainer._world.gather("everybody to have changed the terms", None)
        trainer.schedule = schedule
        orders, numbers = [], []
        for _ in range(PASSES):
            loss, gradient = trainer.value_and_grad(batch)
            orders.append([str(task) for task in driver.agreement._order.latest])
            numbers.append([loss, [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(gradient)]])
        cases[f"{carrier} {protocol} {schedule}"] = {"orders": orders, "numbers": numbers}
    found = {"cases": cases, "losses": [report.loss for report in trainer.steps(2)]}
    (folder / f"orders-{trainer._world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[2:] == ["off"]:
        agreement.member = lambda scheduler, *others: scheduler
    main(Path(sys.argv[1]))
