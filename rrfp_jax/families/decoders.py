"""Families of decoders: layers of `models/decoder.py`, with the `Block` of `models/moe.py` for experts."""

from __future__ import annotations

from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.families.family import Family, Json
from rrfp_jax.families.sizes import SIZES, completed_sizes, inner, number, whole
from rrfp_jax.families.tables import LLAMA_TABLE, MIXTRAL_TABLE, QWEN3_TABLE
from rrfp_jax.fields import shown

_SIZES = {
    **SIZES,
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "rope_base": "rope_theta",
    "rope_stretch": "rope_scaling",
}

_FIXED = {
    "norm": "rms",
    "gated": True,
    "biases": False,
    "positions": "rotary",
    "parallel": False,
    "causal": True,
}

_STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Of `rope_scaling`, in the order of `rope_stretch` in `models/decoder.py`."""


def _completed(config: Json) -> dict[str, Any]:
    rope = inner(config, "rope_parameters")  # transformers 5 writes it for rope_theta and rope_scaling
    theta = number(rope, "rope_theta", 0, number(config, "rope_theta", 0, 10_000.0))
    return completed_sizes(config) | {
        "vocab_size": number(config, "vocab_size"),
        "rms_norm_eps": number(config, "rms_norm_eps", 0),
        "rope_theta": float(theta),
        "rope_scaling": _stretch(inner(config, "rope_scaling") or rope),
    }


def _stretch(scaling: Json) -> tuple[float, ...]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"rope_scaling is of the type {shown(kind)}: only 'llama3' is computed here")
    return () if kind == "default" else tuple(float(number(scaling, key, 0)) for key in _STRETCH)


def _reduced(config: Json) -> dict[str, Any]:
    stretch: dict[str, Any] = dict(zip(_STRETCH, config["rope_scaling"], strict=False))
    if stretch:
        stretch |= {"rope_type": "llama3", _STRETCH[-1]: int(stretch[_STRETCH[-1]])}
    return dict(config) | {"rope_scaling": stretch or None}


LLAMA3 = Family(
    name="llama3",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    table=LLAMA_TABLE,
    sizes=_SIZES,
    fixed=_FIXED | {"qk_norm": False},
    understood={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    completed=_completed,
    reduced=_reduced,
)

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    table=QWEN3_TABLE,
    sizes=_SIZES,
    fixed=_FIXED | {"qk_norm": True},
    understood={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    completed=_completed,
    reduced=_reduced,
)

_EXPERTS = {"n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    table=MIXTRAL_TABLE,
    sizes=_SIZES | _EXPERTS,
    fixed=_FIXED | {"qk_norm": False},
    understood={"hidden_act": "silu", "sliding_window": None},
    completed=lambda config: _completed(config) | {key: whole(config, key) for key in _EXPERTS.values()},
    reduced=_reduced,
)
