"""A rank that joins its run, and tells what there is of it in the key-value store and in its environment.

python -m tests.attacks.victim FILE     calls the other ranks once there is that file
"""

import json
import os
import sys
import time
from pathlib import Path

from rrfp_jax.runtime import _jax
from rrfp_jax.runtime.run import handshake
from rrfp_jax.runtime.run.join import join

call = handshake._call


def call_when_told(*arguments):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return call(*arguments)


handshake._call = call_when_told

world = join()
world.gather("all to have joined", None)
stored = [(key, value.hex()) for key, value in _jax.key_value_store().key_value_dir_get_bytes("rrfp")]
named = [name for name in os.environ if "TOKEN" in name]
print(json.dumps({"ranks": world.gather("ranks", world.rank), "stored": stored, "named": named}), flush=True)
world.gather("the end", None)
