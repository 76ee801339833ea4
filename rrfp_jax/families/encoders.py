"""Families of encoders of images: `PatchEmbed`, `EncoderBlock`, the norm of `Project` of `models/vlm.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.families.family import Family, Json
from rrfp_jax.families.sizes import SIZES, completed_sizes, number
from rrfp_jax.families.tables import SIGLIP_TABLE, VIT_TABLE

_SIZES = {
    **SIZES,
    "patch_size": "patch_size",
    "grid": "grid",
    "norm_epsilon": "layer_norm_eps",
    "mean": "image_mean",
    "std": "image_std",
}

_FIXED = {
    "norm": "layer",
    "gated": False,
    "biases": True,
    "qk_norm": False,
    "positions": "learned",
    "parallel": False,
    "causal": False,
}

_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Of both families in `transformers`, the last two in its processors; SigLIP leaves out what is so."""

_LEAST = 1e-6
"""Of what pixels are divided by."""

_BICUBIC = 3
"""Pillow's number of how `rrfp.data` scales images."""


def _completed(config: Json) -> dict[str, Any]:
    side = number(config, "image_size") // number(config, "patch_size")
    return completed_sizes(config) | {
        "patch_size": config["patch_size"],
        "grid": (side, side),
        "layer_norm_eps": number(config, "layer_norm_eps", 0),
        "image_mean": _colours(config, "image_mean", 0),
        "image_std": _colours(config, "image_std", _LEAST),
    }


def _colours(config: Json, key: str, least: float) -> tuple[float, ...]:
    values = config[key]
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise UsageError(f"{key}={values!r}: give three numbers")
    return tuple(float(number({key: value}, key, least)) for value in values)


def _reduced(config: Json) -> dict[str, Any]:
    derived = ("num_key_value_heads", "head_dim", "grid", "image_mean", "image_std")
    kept = {key: value for key, value in config.items() if key not in derived}
    return kept | {"image_size": _side(config)}


def _side(config: Json) -> int:
    """Pixels of an image's side; a grid that is no square is told as a difference from the one read again."""
    return int(config["grid"][0] * config["patch_size"])


def _processor(kind: str) -> Callable[[Json], Json]:
    """For a class of image processors."""
    return lambda config: {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": _side(config), "width": _side(config)},
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config["image_mean"]),
        "image_std": list(config["image_std"]),
    }


VIT = Family(
    name="vit",
    model_types=("vit",),
    architecture="ViTModel",
    table=VIT_TABLE,
    sizes=_SIZES,
    fixed=_FIXED | {"class_token": True, "exact_gelu": True},
    understood={"hidden_act": "gelu", "qkv_bias": True, "num_channels": 3},
    defaults=_DEFAULTS | {"layer_norm_eps": 1e-12},
    completed=_completed,
    reduced=_reduced,
    processor=_processor("ViTImageProcessor"),
    prefixes=("", "vit."),
    extra=("classifier.", "pooler.", "vit.pooler."),
    elsewhere=("hidden.", "out."),
)

SIGLIP = Family(
    name="siglip",
    model_types=("siglip_vision_model", "siglip"),
    architecture="SiglipVisionModel",
    table=SIGLIP_TABLE,
    sizes=_SIZES,
    fixed=_FIXED | {"class_token": False, "exact_gelu": False},
    understood={"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
    inner="vision_config",
    defaults=_DEFAULTS | {"layer_norm_eps": 1e-6},
    completed=_completed,
    reduced=lambda config: {**_reduced(config), "vision_use_head": False},  # that head is not of our layers
    processor=_processor("SiglipImageProcessor"),
    prefixes=("vision_model.", ""),
    extra=("text_model.", "vision_model.head.", "head.", "logit_scale", "logit_bias"),
    elsewhere=("hidden.", "out."),
)
