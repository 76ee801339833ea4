"""Objects of flax that a plain training loop has, and what is wanted here instead of them.

They are told by the names of their classes, so that nobody who uses none of flax has to import it.
"""

from __future__ import annotations

from typing import Any

KINDS = {
    ("flax.nnx", "Module"): "NNX module",
    ("flax.linen", "Module"): "Linen module",
    ("flax.nnx", "Optimizer"): "nnx.Optimizer",
    ("flax.training", "TrainState"): "TrainState",
}
"""By the package and name of a class: what its instances are called."""


def kind_of(value: Any) -> str | None:
    """Which of `KINDS` something is; None if it is none of them, as a class is not."""
    bases = (base for base in type(value).__mro__ if base.__module__.startswith("flax."))
    names = ((".".join(base.__module__.split(".")[:2]), base.__name__) for base in bases)
    return next((KINDS[name] for name in names if name in KINDS), None)


def instead_of_layer(value: Any) -> str:
    """What to write for something that stands where a layer from `rrfp.layer` must."""
    name = type(value).__name__
    if isinstance(value, type):
        return f"{value.__name__} is a class; write rrfp.layer({value.__name__}, ...) with its arguments"
    match kind_of(value):
        case "NNX module":
            return (
                f"{name} is a module that is already built, on one device; write rrfp.layer({name}, ...) "
                f"with its class and arguments, so that only the stage that owns it allocates it"
            )
        case "Linen module":
            return f"{name} is a Linen module; write rrfp.layer({name}(...))"
        case "nnx.Optimizer" | "TrainState" as kind:
            return f"this is flax's {kind}, the state of a training; list the layers of its model"
    own = getattr(value, "__name__", f"something of type {name}")
    return f"{own} is no layer; write rrfp.layer({own if callable(value) else '...'})"


def instead_of_layers(value: Any) -> str:
    """What to write for something that stands where a list of layers must."""
    listed = "[rrfp.layer(Embed, ...), rrfp.layer(Block, ..., repeat=24), rrfp.layer(Head, ...)]"
    name, kind = type(value).__name__, kind_of(value)
    if kind in ("NNX module", "Linen module"):
        return f"{name} is one {kind}, and stages are cut between layers; list its parts: {listed}"
    if kind is not None:
        return f"this is flax's {kind}, the state of a training; list the layers of its model: {listed}"
    own = getattr(value, "name", None)  # of a single layer
    what = f"{own} is one layer" if isinstance(own, str) else f"this is of type {name}"
    return f"{what}; give a list of layers: {listed}"


def instead_of_optimizer(value: Any) -> str:
    """What to write for something that stands where an optax transformation must."""
    kind = kind_of(value)
    if kind in ("nnx.Optimizer", "TrainState"):
        return (
            f"this is flax's {kind}, which holds the state of one device; a Trainer makes that of every "
            f"stage itself: give the transformation in it, its .tx"
        )
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__name__} is a function; call it for a transformation, such as optax.adamw(3e-4)"
    return "give an optax transformation, such as optax.adamw(3e-4)"
