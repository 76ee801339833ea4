"""What the `config.json` of every transformer says."""

from __future__ import annotations

from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.families.family import Json
from rrfp_jax.fields import shown

LARGEST = 2**53
"""What sizes and wavelengths are below."""

SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "d_ff": "intermediate_size",
}
"""The key of each field of our config."""


def completed_sizes(config: Json) -> dict[str, Any]:
    """All keys of `SIZES`; files may leave out what follows from others."""
    width, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    derived = {"num_key_value_heads": heads, "head_dim": width // heads}
    return {key: whole(config, key, derived.get(key)) for key in SIZES.values()}


def whole(config: Json, key: str, default: float | None = None) -> int:
    """What a key says, at least 1; raises as `number` does, and where it is no whole number."""
    value = number(config, key, default=default)
    if value != int(value):
        raise UsageError(f"{key}={shown(value)}: is no whole number")
    return int(value)


def inner(config: Json, key: str) -> Json:
    """The object at a key; an empty one if there is none.

    Raises:
        UsageError: something else is there.
    """
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise UsageError(f"{key}={shown(found)}: is no object")
    return found


def number(config: Json, key: str, least: float = 1, default: float | None = None) -> Any:
    """What a key says; None there is as if it were not there.

    Raises:
        UsageError: it is not there, or no number of at least `least`.
    """
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"{key} is not there")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < LARGEST:
        raise UsageError(f"{key}={shown(value)}: is no number from {least} on that a model can have")
    return value
