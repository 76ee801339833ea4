"""What must be equal in all processes of a run, besides its settings."""

from __future__ import annotations

import jax

from rrfp_jax.runtime.engine.engine import Engine


def as_text(engine: Engine) -> dict[str, str]:
    """What an engine is made of, as far as another process can have it otherwise; by name."""
    pipe, layout = engine.pipe, engine.layout
    found = {
        "split": engine.split,
        "frozen": pipe.frozen,
        "tied": pipe.tied,
        "sharding": [*pipe.sharding.items()],  # the first that matches counts
        "carry": pipe.carry,
        "mesh": (layout.widths, layout.replicas, layout.shard_optimizer),
        "delays": engine.setup.execution.delays,
        "jax": jax.__version__,
    }
    return {name: str(value) for name, value in found.items()}
