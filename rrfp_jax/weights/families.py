"""Published families of models: what their `config.json` says, in the terms of the layers of `models/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.weights.tables import (
    LLAMA_TABLE,
    MIXTRAL_TABLE,
    QWEN3_TABLE,
    SIGLIP_TABLE,
    VIT_TABLE,
    FamilyTable,
    TensorNames,
)

CONFIG, PIXELS = "config.json", "preprocessor_config.json"
"""The files of a model; the second says how images become its input."""

Json: TypeAlias = Mapping[str, Any]
"""An object of `config.json`."""


class LayerNames(NamedTuple):
    """What the layers of `models/` know of all families that they compute: of decoders, or of encoders."""

    sizes: Mapping[str, str]  # the key of each field of our config that may differ between models
    fixed: Mapping[str, Any]  # the other fields, where they are the same in all of them
    completed: Callable[[Json], Json]  # all these keys, whichever form a `config.json` has; or UsageError
    reduced: Callable[[Json], Json]  # what a file has of these keys
    elsewhere: tuple[str, ...] = ()  # beginnings of parameters of the last layer that no family has


@dataclass(frozen=True)
class Family:
    """What is known of one, as `rrfp export --as` has it."""

    name: str
    model_types: tuple[str, ...]  # in `config.json`; the first is written
    architecture: str
    table: FamilyTable
    layers: LayerNames
    fixed: Mapping[str, Any]  # fields of our config besides those of `layers`
    understood: Json
    """The only value that a key may have, if it is there: with another one a model computes what our layers
    do not. They are written, too."""
    counts: Mapping[str, str] = field(default_factory=dict)  # sizes besides those of `layers`
    defaults: Json = field(default_factory=dict)  # of keys that a `config.json` may leave out
    written: Json = field(default_factory=dict)  # into it, besides
    inner: str = ""  # the key of the object that says it all, where a `config.json` has one
    processor: str = ""  # class of its images' processor, of which `preprocessor_config.json` tells
    prefixes: tuple[str, ...] = ("",)  # that names of tensors may begin with; we write the first
    extra: tuple[str, ...] = ()  # beginnings of the names of tensors that our layers have no use for

    @property
    def sizes(self) -> Mapping[str, str]:
        """The key of each field of our config that may differ between its models."""
        return {**self.layers.sizes, **self.counts}

    def fields_of(self, config: Json) -> dict[str, Any]:
        """The fields of our config, by its `config.json`; `UsageError` for what our layers do not compute."""
        inner = config.get(self.inner)
        config = {**self.defaults, **config, **(inner if isinstance(inner, dict) else {})}
        for key, own in self.understood.items():
            if (given := config.get(key, own)) != own:
                raise UsageError(f"{key}={shown(given)}: of {self.name} only {key}={own!r} is computed here")
        counts = {key: _whole(config, key) for key in self.counts.values()}
        found = {**self.layers.completed(config), **counts}
        return {ours: found[key] for ours, key in self.sizes.items()} | self._fixed

    def files_of(self, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What `config.json` says of a model with these fields, and the file beside it; see `fields_of`.

        Raises:
            UsageError: no model of the family has such fields; names them.
        """
        wrong = differences(self._fixed, fields)
        wrong = wrong or [f"there is no {ours}" for ours in self.sizes if ours not in fields]
        if not wrong:
            sizes = {key: fields[ours] for ours, key in self.sizes.items()}
            named = {"architectures": [self.architecture], "model_type": self.model_types[0]}
            config = {**named, **self.understood, **self.layers.reduced(sizes), **self.written}
            pixels = _processing(self.processor, sizes) if self.processor else {}
            wrong = differences(self.fields_of(pixels | config), fields)
        if wrong:
            raise UsageError(f"no model of {self.name} is so: {'; '.join(wrong)}")
        return {CONFIG: config, PIXELS: pixels} if pixels else {CONFIG: config}

    @property
    def _fixed(self) -> dict[str, Any]:
        return {"parallel": False, **self.layers.fixed, **self.fixed}

    def stored(
        self, fields: Mapping[str, Any], first: int, prefix: str, tied: bool
    ) -> dict[str, TensorNames]:
        """The tensors of every parameter, see `FamilyTable.of_layers`; a tied head has the embedding's."""
        blocks = fields["n_layers"]
        found = self.table.of_layers(blocks, first, prefix, fields.get("n_experts", 0))
        if tied and TIED in self.table.last:
            found[f"{first + blocks + 1}.{TIED}"] = found[f"{first}.{TIED}"]
        return found


TIED = "tokens.embedding"
"""The parameter that is one in the first and the last layer of a model that ties them."""


def differences(published: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Where fields of our config are not what they are in a published model; a sentence each."""
    return [
        f"{name}={shown(ours[name])}, not {shown(value)}" if name in ours else f"there is no {name}"
        for name, value in published.items()
        if name not in ours or _plain(ours[name]) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    """Lists as tuples, which JSON makes lists of."""
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


_SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "d_ff": "intermediate_size",
}
"""The key of each field of our config."""


def _sizes(config: Json) -> dict[str, Any]:
    """All keys of `_SIZES`; files may leave out what follows from others."""
    width, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    derived = {"num_key_value_heads": heads, "head_dim": width // heads}
    return {key: _whole(config, key, derived.get(key)) for key in _SIZES.values()}


def _whole(config: Json, key: str, default: float | None = None) -> int:
    """What a key says, a whole number of at least 1; raises as `_number` does."""
    value = _number(config, key, default=default)
    if value != int(value):
        raise UsageError(f"{key}={shown(value)}: is no whole number")
    return int(value)


def _object(config: Json, key: str) -> Json:
    """The object at a key, empty if there is none; `UsageError` if something else is there."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise UsageError(f"{key}={shown(found)}: is no object")
    return found


def _number(config: Json, key: str, least: float = 1, default: float | None = None) -> Any:
    """What a key says, None being nothing; `UsageError` if that is no number of at least `least`."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"{key} is not there")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 2**53:
        raise UsageError(f"{key}={shown(value)}: is no number from {least} on that a model can have")
    return value


_STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Of `rope_scaling`, in the order of `rope_stretch` in `models/decoder.py`."""


def _decoder_config(config: Json) -> dict[str, Any]:
    rope = _object(config, "rope_parameters")  # transformers 5 writes it for rope_theta and rope_scaling
    theta = _number(rope, "rope_theta", 0, _number(config, "rope_theta", 0, 10_000.0))
    return _sizes(config) | {
        "vocab_size": _number(config, "vocab_size"),
        "rms_norm_eps": _number(config, "rms_norm_eps", 0),
        "rope_theta": float(theta),
        "rope_scaling": _stretch(_object(config, "rope_scaling") or rope),
    }


def _stretch(scaling: Json) -> tuple[float, ...]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"rope_scaling is of the type {shown(kind)}: only 'llama3' is computed here")
    return () if kind == "default" else tuple(float(_number(scaling, key, 0)) for key in _STRETCH)


def _decoder_file(config: Json) -> dict[str, Any]:
    stretch: dict[str, Any] = dict(zip(_STRETCH, config["rope_scaling"], strict=False))
    if stretch:
        stretch |= {"rope_type": "llama3", _STRETCH[-1]: int(stretch[_STRETCH[-1]])}
    return dict(config) | {"rope_scaling": stretch or None}


DECODERS = LayerNames(
    sizes={
        **_SIZES,
        "vocab_size": "vocab_size",
        "norm_epsilon": "rms_norm_eps",
        "rope_base": "rope_theta",
        "rope_stretch": "rope_scaling",
    },
    fixed={"norm": "rms", "gated": True, "biases": False, "positions": "rotary", "causal": True},
    completed=_decoder_config,
    reduced=_decoder_file,
)

LLAMA3 = Family(
    *("llama3", ("llama",), "LlamaForCausalLM", LLAMA_TABLE, DECODERS),
    fixed={"qk_norm": False},
    understood={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)

QWEN3 = Family(
    *("qwen3", ("qwen3",), "Qwen3ForCausalLM", QWEN3_TABLE, DECODERS),
    fixed={"qk_norm": True},
    understood={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
)

MIXTRAL = Family(
    *("mixtral", ("mixtral",), "MixtralForCausalLM", MIXTRAL_TABLE, DECODERS),
    fixed={"qk_norm": False},
    counts={"n_experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    understood={"hidden_act": "silu", "sliding_window": None},
)


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

COMPUTED_PIXELS = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
"""The only values that these keys of `preprocessor_config.json` may have, if they are there."""


def _encoder_config(config: Json) -> dict[str, Any]:
    side = _number(config, "image_size") // _number(config, "patch_size")
    return _sizes(config) | {
        "patch_size": config["patch_size"],
        "grid": (side, side),
        "layer_norm_eps": _number(config, "layer_norm_eps", 0),
        "image_mean": _colours(config, "image_mean", 0),
        "image_std": _colours(config, "image_std", 1e-6),  # which pixels are divided by
    }


def _colours(config: Json, key: str, least: float) -> tuple[float, ...]:
    values = config[key]
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise UsageError(f"{key}={values!r}: give three numbers")
    return tuple(float(_number({key: value}, key, least)) for value in values)


def _encoder_file(config: Json) -> dict[str, Any]:
    derived = ("num_key_value_heads", "head_dim", "grid", "image_mean", "image_std")
    return {key: value for key, value in config.items() if key not in derived} | {"image_size": _side(config)}


def _side(config: Json) -> int:
    """Pixels of an image's side; a grid that is no square is told as a difference from the one read again."""
    return int(config["grid"][0] * config["patch_size"])


def _processing(kind: str, config: Json) -> dict[str, Any]:
    """What `preprocessor_config.json` says of images, for a class of their processors."""
    return {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": _side(config), "width": _side(config)},
        "resample": 3,  # bicubic, as `rrfp.data` scales images
        **COMPUTED_PIXELS,
        "image_mean": list(config["image_mean"]),
        "image_std": list(config["image_std"]),
    }


ENCODERS = LayerNames(
    sizes={
        **_SIZES,
        "patch_size": "patch_size",
        "grid": "grid",
        "norm_epsilon": "layer_norm_eps",
        "mean": "image_mean",
        "std": "image_std",
    },
    fixed={"norm": "layer", "gated": False, "biases": True, "positions": "learned", "causal": False},
    completed=_encoder_config,
    reduced=_encoder_file,
    elsewhere=("hidden.", "out."),
)

VIT = Family(
    *("vit", ("vit",), "ViTModel", VIT_TABLE, ENCODERS),
    fixed={"class_token": True, "exact_gelu": True, "qk_norm": False},
    understood={"hidden_act": "gelu", "qkv_bias": True, "num_channels": 3},
    defaults=_DEFAULTS | {"layer_norm_eps": 1e-12},
    processor="ViTImageProcessor",
    prefixes=("", "vit."),
    extra=("classifier.", "pooler.", "vit.pooler."),
)

SIGLIP = Family(
    *("siglip", ("siglip_vision_model", "siglip"), "SiglipVisionModel", SIGLIP_TABLE, ENCODERS),
    fixed={"class_token": False, "exact_gelu": False, "qk_norm": False},
    understood={"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
    defaults=_DEFAULTS | {"layer_norm_eps": 1e-6},
    written={"vision_use_head": False},  # that head is not of our layers
    inner="vision_config",
    processor="SiglipImageProcessor",
    prefixes=("vision_model.", ""),
    extra=("text_model.", "vision_model.head.", "head.", "logit_scale", "logit_bias"),
)

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
