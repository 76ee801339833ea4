"""A rank that joins and meets the others again and again, without training: a line for each meeting.

Argument: "doubling" has TCP double its pauses, as kernels before Linux 6.15 do.
"""

import sys
import time

from rrfp_jax.runtime.run import coordinator
from rrfp_jax.runtime.run.join import join

if sys.argv[1:] == ["doubling"]:
    coordinator.TCP_RTO_MAX_MS = 9999  # no option
world = join()
while True:
    world.gather("a meeting", None)
    print(f"{time.time()}", flush=True)
    time.sleep(0.1)
