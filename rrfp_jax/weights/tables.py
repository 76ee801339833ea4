"""The names of published tensors, by parameter of `models/decoder.py` and `models/vlm.py`: a table a family.

A table has three parts, for the first layer, for each block and for the last one; "{}" stands for the number
of the block, "{expert}" for that of each of its experts. Names are those of the files at huggingface.co,
which its `transformers` reads and writes. An `Arrangement` makes one of our arrays of published ones, and
takes it apart again, to the bit.

Shapes: I input channels of a matrix product, O output channels, S pixels of a patch's side, C colours, N rows
of a table, D channels, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class Arrangement(NamedTuple):
    """One way and back."""

    ours: Callable[..., Array]  # of published arrays
    theirs: Callable[[Array], Sequence[Array]]  # all the published arrays, of ours


def _halves(ours: Array) -> Sequence[Array]:
    return np.split(ours, 2, axis=-1)


AS_IS = Arrangement(lambda theirs: theirs, lambda ours: [ours])

KERNEL = Arrangement(np.transpose, lambda ours: [ours.T])
"""A matrix product: PyTorch has [O, I], flax [I, O]."""

FUSED_KERNELS = Arrangement(
    lambda first, second: np.concatenate([first, second]).T, lambda ours: [half.T for half in _halves(ours)]
)
"""Two matrix products of as many channels each, side by side: [O, I] twice, and [I, 2 * O]."""

FUSED_BIASES = Arrangement(lambda first, second: np.concatenate([first, second]), _halves)
"""Their biases: [O] twice, and [2 * O]."""

EXPERTS = Arrangement(
    lambda *theirs: np.stack([matrix.T for matrix in theirs]), lambda ours: [matrix.T for matrix in ours]
)
"""A matrix of every expert: [O, I] each, and [E, I, O]."""


def _convolution(ours: Array) -> Sequence[Array]:
    side = math.isqrt(len(ours) // COLOURS)
    return [ours.reshape(side, side, COLOURS, -1).transpose(3, 2, 0, 1)]


COLOURS = 3

PATCHES = Arrangement(lambda theirs: theirs.transpose(2, 3, 1, 0).reshape(-1, len(theirs)), _convolution)
"""Patches projected: a convolution [D, C, S, S], and a product [S * S * C, D] of rows, columns, colours."""

ROWS = Arrangement(lambda theirs: theirs[0], lambda ours: [ours[None]])
"""A table [N, D], published as [1, N, D]."""


class TensorNames(NamedTuple):
    """The published tensors of one of our parameters, and the arrangement of their values."""

    names: tuple[str, ...]
    arrangement: Arrangement = AS_IS


Part: TypeAlias = Mapping[str, TensorNames]
"""By the path of a parameter in its layer, such as "attention.query.kernel"."""


class FamilyTable(NamedTuple):
    """A family's names for a list of layers: one, some equal ones, one."""

    first: Part
    block: Part
    last: Part
    computed: tuple[str, ...] = ()  # that old files have besides, although they follow from `config.json`

    def of_layers(self, blocks: int, first: int, prefix: str, experts: int) -> dict[str, TensorNames]:
        """The tensors of every parameter by its path, such as "3.attention.query.kernel"."""
        layers = [self.first, *[self.block] * blocks, self.last]
        return {
            f"{first + i}.{path}": own._replace(
                names=tuple(prefix + of for name in own.names for of in _numbered(name, i - 1, experts))
            )
            for i, layer in enumerate(layers)
            for path, own in layer.items()
        }


def _numbered(name: str, block: int, experts: int) -> list[str]:
    """The name in a block, and of each of its experts."""
    name = name.replace("{}", str(block))
    return [name.replace("{expert}", str(e)) for e in range(experts)] if "{expert}" in name else [name]


def _one(name: str, arrangement: Arrangement = AS_IS) -> TensorNames:
    return TensorNames((name,), arrangement)


def _norm(ours: str, theirs: str) -> Part:
    """A layer normalisation, with its bias."""
    return {f"{ours}.scale": _one(f"{theirs}.weight"), f"{ours}.bias": _one(f"{theirs}.bias")}


def _linear(ours: str, theirs: str, arrangement: Arrangement = KERNEL) -> Part:
    """A matrix product with its bias."""
    return {f"{ours}.kernel": _one(f"{theirs}.weight", arrangement), f"{ours}.bias": _one(f"{theirs}.bias")}


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LAYER = "model.layers.{}."

_ATTENTION: Part = {
    "attention_norm.scale": _one(_LAYER + "input_layernorm.weight"),
    "attention.query.kernel": _one(_LAYER + "self_attn.q_proj.weight", KERNEL),
    "attention.key_value.kernel": TensorNames(
        (_LAYER + "self_attn.k_proj.weight", _LAYER + "self_attn.v_proj.weight"), FUSED_KERNELS
    ),
    "attention.out.kernel": _one(_LAYER + "self_attn.o_proj.weight", KERNEL),
    "mlp_norm.scale": _one(_LAYER + "post_attention_layernorm.weight"),
}

LLAMA_TABLE = FamilyTable(
    first={"tokens.embedding": _one(EMBEDDING)},
    block={
        **_ATTENTION,
        "mlp.gate.kernel": _one(_LAYER + "mlp.gate_proj.weight", KERNEL),
        "mlp.up.kernel": _one(_LAYER + "mlp.up_proj.weight", KERNEL),
        "mlp.down.kernel": _one(_LAYER + "mlp.down_proj.weight", KERNEL),
    },
    last={"norm.scale": _one("model.norm.weight"), "tokens.embedding": _one(HEAD)},
    computed=(_LAYER + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)

_EXPERT = _LAYER + "block_sparse_moe.experts.{expert}."

MIXTRAL_TABLE = LLAMA_TABLE._replace(
    block={
        **_ATTENTION,
        "experts.router": _one(_LAYER + "block_sparse_moe.gate.weight", KERNEL),
        "experts.gate": _one(_EXPERT + "w1.weight", EXPERTS),
        "experts.up": _one(_EXPERT + "w3.weight", EXPERTS),
        "experts.down": _one(_EXPERT + "w2.weight", EXPERTS),
    },
)

QWEN3_TABLE = LLAMA_TABLE._replace(
    block={
        **LLAMA_TABLE.block,
        "attention.query_norm.scale": _one(_LAYER + "self_attn.q_norm.weight"),
        "attention.key_norm.scale": _one(_LAYER + "self_attn.k_norm.weight"),
    },
    computed=(),
)


def _encoder_block(layer: str, names: str) -> Part:
    """The block of an encoder, given its eight names: two norms, four of attention, two of the MLP."""
    norm, query, key, value, out, mlp_norm, up, down = (layer + name for name in names.split())
    return {
        **_norm("attention_norm", norm),
        **_linear("attention.query", query),
        "attention.key_value.kernel": TensorNames((f"{key}.weight", f"{value}.weight"), FUSED_KERNELS),
        "attention.key_value.bias": TensorNames((f"{key}.bias", f"{value}.bias"), FUSED_BIASES),
        **_linear("attention.out", out),
        **_norm("mlp_norm", mlp_norm),
        **_linear("mlp.up", up),
        **_linear("mlp.down", down),
    }


VIT_TABLE = FamilyTable(
    first={
        **_linear("pixels", "embeddings.patch_embeddings.projection", PATCHES),
        "class_token.embedding": _one("embeddings.cls_token", ROWS),
        "places.embedding": _one("embeddings.position_embeddings", ROWS),
    },
    block=_encoder_block(
        "encoder.layer.{}.",
        "layernorm_before attention.attention.query attention.attention.key attention.attention.value "
        "attention.output.dense layernorm_after intermediate.dense output.dense",
    ),
    last=_norm("norm", "layernorm"),
)

SIGLIP_TABLE = FamilyTable(
    first={
        **_linear("pixels", "embeddings.patch_embedding", PATCHES),
        "places.embedding": _one("embeddings.position_embedding.weight"),
    },
    block=_encoder_block(
        "encoder.layers.{}.",
        "layer_norm1 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
        "layer_norm2 mlp.fc1 mlp.fc2",
    ),
    last=_norm("norm", "post_layernorm"),
)
