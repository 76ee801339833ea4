"""A rank that waits at a moment of its run until a fault was caused there: `moments.main()`.

MOMENT names the moment, MOMENT_RANK the rank, MOMENT_FOLDER a folder. At the moment that rank writes `came`
there, and goes on once there is `caused`. With MOMENT_FAULT=full its disk is full from then on.
"""

import errno
import os
import sys
import time
from pathlib import Path

MOMENTS = ("joining", "compiling", "step", "validation", "saving", "shutdown")
FAULT_STEP, DISPATCHES = 3, 3
"""The step, and how many of its tasks were dispatched before."""
LIMIT_SECONDS = 120.0
now = {"phase": "", "dispatches": 0}


def at(moment):
    """Called at the point of a moment, on every rank."""
    if os.environ.get("MOMENT") != moment or os.environ["MOMENT_RANK"] != os.environ["RRFP_RANK"]:
        return
    folder = Path(os.environ["MOMENT_FOLDER"])
    if not (folder / "came").exists():
        (folder / "came").touch()
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (folder / "caused").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    if os.environ.get("MOMENT_FAULT") == "full" and moment == "saving":
        raise OSError(errno.ENOSPC, "No space left on device")


def enter(phase):
    now.update(phase=phase, dispatches=0)


def hook():
    """Ask at these moments: between two tasks, while a leaf is written, and before the runtime's own exit."""
    from rrfp_jax.checkpoint import saving
    from rrfp_jax.runtime.run.recorder import FlightRecorder

    dispatched, write_leaf = FlightRecorder.dispatched, saving.write_leaf

    def noted(self, step, *task):
        now["dispatches"] += 1
        if now["dispatches"] > DISPATCHES:
            at("validation" if now["phase"] == "validation" else "step" if step == FAULT_STEP else "")
        dispatched(self, step, *task)

    def written(*leaf):
        at("saving")
        return write_leaf(*leaf)

    FlightRecorder.dispatched, saving.write_leaf = noted, written


def main():
    """`rrfp` with the arguments of this process."""
    from rrfp_jax.commands import cli

    at("joining")
    hook()
    sys.argv[0] = "rrfp"
    sys.exit(cli.run())
