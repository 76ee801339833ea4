"""The families that are known."""

from __future__ import annotations

from rrfp_jax.errors import UsageError
from rrfp_jax.families.decoders import LLAMA3, MIXTRAL, QWEN3
from rrfp_jax.families.encoders import SIGLIP, VIT
from rrfp_jax.families.family import Family, Json
from rrfp_jax.fields import shown

FAMILIES = {family.name: family for family in (LLAMA3, QWEN3, MIXTRAL, VIT, SIGLIP)}
"""By name."""


def family_of(config: Json) -> Family:
    """The family of a model, by its `config.json`.

    Raises:
        UsageError: it is not known here, or its tensors are not plain numbers.
    """
    found = [family for family in FAMILIES.values() if config.get("model_type") in family.model_types]
    if not found:
        known = ", ".join(repr(kind) for family in FAMILIES.values() for kind in family.model_types)
        raise UsageError(
            f"model_type={shown(config.get('model_type'))}: known are {known}; for others give "
            f"weights.pretrained a map of names"
        )
    if config.get("quantization_config"):
        raise UsageError("quantization_config: the tensors are quantized; take the model that is not")
    return found[0]
