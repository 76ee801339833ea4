"""One of four ranks, two to a stage, through changes: `-m tests.support.group_changes FOLDER`.

One after the other: schedules (hints and fixed orders in turns), chunks (two a stage, looped and as a v),
budgets (in bytes), sigterm (to rank 1, between two tasks of a step). Inputs arrive at different times.
Writes ranks-<rank>.json: by change a list of steps, each with its loss, what the rank dispatched, and
whatever the change is about; then what is left of the messages once the trainers are gone.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import rrfp_jax as rrfp
from rrfp_jax.runtime._jax import key_value_store
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.run.signals import StopsAfterStep, heard_signals
from tests.support import toy

SCHEDULES = ("bf", "1f1b", "bfw", "gpipe", "gpipe", "bf", "zb-h1", "bfw")
MICROBATCHES = 6
STOPPED_STEP, STOPPED_DISPATCH = 2, 3
"""Where SIGTERM comes."""

GONE_SECONDS = 10.0


def data(step):
    return toy.microbatches(MICROBATCHES, seed=step)


def trainer(tp=2, **kwargs):
    mesh = rrfp.Mesh(pp=2, tp=tp, **kwargs.pop("mesh", {}))
    return toy.trainer(mesh=mesh, data=data, delays=Delays(skew=0.01, seed=1), **kwargs)


def schedules():
    """One step under each schedule."""
    made = trainer(max_in_flight=3)
    for schedule in SCHEDULES:
        made.schedule = schedule
        yield from steps(made, 1)


def chunks():
    """Two steps for each shape and hint, each a trainer of its own."""
    for shape, schedule in (("looped", "bf"), ("looped", "bfw"), ("v", "bf"), ("v", "bfw")):
        yield from steps(trainer(mesh={"chunks": 2, "shape": shape}, schedule=schedule), 2)


def budgets():
    """Two steps in as little as there may be, and in somewhat more."""
    try:
        trainer(activation_budget=1, schedule="bfw").start()
    except rrfp.UsageError as error:
        least = int(str(error).split("at least activation_budget=")[1].split(",")[0])
    for factor in (1.0, 2.5):
        yield from steps(trainer(activation_budget=int(factor * least), schedule="bfw"), 2)


def sigterm():
    """Ten steps, unless it is agreed to stop."""
    made = trainer()
    made.start()
    world, recorder = made._world, made._world.recorder
    dispatched, count = recorder.dispatched, 0

    def noted(step, *entry):
        nonlocal count
        count += step == STOPPED_STEP
        if count == STOPPED_DISPATCH and world.rank == 1 and not world.stop.requested:
            os.kill(os.getpid(), signal.SIGTERM)
            while not world.stop.requested:
                time.sleep(0.001)
        dispatched(step, *entry)

    recorder.dispatched = noted
    with heard_signals(signal.SIGTERM, answer=StopsAfterStep(world, 60.0)):
        for _ in range(10):
            yield from steps(made, 1)
            if world.stop.agreed:
                return


def steps(made, count):
    """Train, as plain data."""
    for report in made.steps(count):
        agreed = made._engine.driver.agreement
        yield {
            "loss": report.loss,
            "order": [str(task) for task in agreed._order.latest] if agreed is not None else [],
            "peak": list(report.peak_bytes),
            "budget": [limit or 0 for limit in report.budget_bytes],
        }


def left():
    """Threads and keys of groups' messages that are still there."""
    threads = [thread for thread in threading.enumerate() if thread.name == "rrfp-group"]
    return len(threads) + len(key_value_store().key_value_dir_get_bytes("rrfp/group/"))


def main(folder):
    found = {change.__name__: list(change()) for change in (schedules, chunks, budgets, sigterm)}
    gc.collect()
    deadline = time.monotonic() + GONE_SECONDS
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    found["left"] = left()
    (folder / f"ranks-{os.environ['RRFP_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
