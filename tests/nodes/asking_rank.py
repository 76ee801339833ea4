"""Rank 1 waits for a value in the coordination service; rank 0 sets it once FILE is there."""

import sys
import time
from pathlib import Path

from jax._src.distributed import global_state

from rrfp_jax.runtime.run.join import join

world, there, longest = join(), Path(sys.argv[1]), 120_000
store = global_state.client
if world.rank == 0:
    print("asks", flush=True)
    while not there.exists():
        time.sleep(0.05)
    store.key_value_set("asked", "for")
    store.blocking_key_value_get("answer", longest)
else:
    print("asks", flush=True)
    store.key_value_set("answer", store.blocking_key_value_get("asked", longest))
