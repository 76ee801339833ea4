"""A rank that joins and meets the others again and again, without training: a line for each meeting.

Arguments: "doubling" has TCP double its pauses, as kernels before Linux 6.15 do; "waiting" FOLDER has rank 1,
which knows where the others listen, write `came` there and go on once there is `caused`.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path

from rrfp_jax.runtime.run import coordinator, links

join = import_module("rrfp_jax.runtime.run.join")
if sys.argv[1:] == ["doubling"]:
    coordinator.TCP_RTO_MAX_MS = 9999  # no option
if sys.argv[1:2] == ["waiting"]:
    require_reachable = links.require_reachable

    def wait(*cards):
        """As that function, after a while."""
        if os.environ["RRFP_RANK"] == "1":
            (Path(sys.argv[2]) / "came").touch()
            while not (Path(sys.argv[2]) / "caused").exists():
                time.sleep(0.01)
        require_reachable(*cards)

    join.require_reachable = wait
world = join.join()
while True:
    world.gather("a meeting", None)
    print(f"{time.time()}", flush=True)
    time.sleep(0.1)
