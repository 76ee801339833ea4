"""What must be equal in all processes before a first step, as text by name, so that a difference is named."""

from __future__ import annotations

from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.programs.fingerprint import fingerprint
from rrfp_jax.runtime.programs.library import specs_of


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
    }
    return {name: str(value) for name, value in found.items()}


def traced_programs(engine: Engine) -> dict[str, str]:
    """Hashes of what the whole model computes, by name: layers, loss and optimizer."""
    bucket, shapes = engine.library.first
    known = {id(own): fingerprint(own.traced, own.initial) for own in shapes}  # repeats are alike
    found = {f"layer {index}": known[id(own)] for index, own in enumerate(shapes)}
    found["the loss"] = fingerprint(engine.pipe.traced_loss(shapes[-1].carry_out, specs_of(bucket)))
    if engine.spec.optimizer is not None:
        whole, _ = engine.staging.optimizer_parts
        found["the optimizer"] = fingerprint(whole.init, whole.update)
    return found
