"""Has programs of two devices compiled or loaded; prints how many were compiled, and what they gave."""

import json
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

from tests import programs  # noqa: E402

print(json.dumps(programs.run(Path(sys.argv[1]))))
