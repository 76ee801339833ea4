"""rrfp train that also writes how many programs XLA compiled in this rank: counted_train.py FOLDER FLAGS."""

import os
import sys
from pathlib import Path

import jax

from rrfp_jax.commands.cli import run_verb
from rrfp_jax.commands.verbs import VERBS

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(seconds) if "backend_compile" in event else None
)
status = run_verb(VERBS["train"], sys.argv[2:])
rank = os.environ["RRFP_RANK"]
Path(sys.argv[1], f"compiled-{rank}").write_text(str(len(compiled)), encoding="utf-8")
sys.exit(status)
