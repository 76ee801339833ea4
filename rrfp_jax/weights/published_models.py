"""Published models: parameters taken from their folders, and checkpoints written under their names."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.checkpoint.folder import CheckpointView
from rrfp_jax.checkpoint.format import Damaged, dtype_of
from rrfp_jax.checkpoint.leaves import PARAMETERS, Key
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import AnyPath, path_of, shown
from rrfp_jax.json_files import Unreadable, flat, read_json
from rrfp_jax.runtime.programs.initial import InitFunction, ModelCheckedInit, SourcedInit
from rrfp_jax.weights.families import (
    COMPUTED_PIXELS,
    CONFIG,
    PIXELS,
    TIED,
    Family,
    differences,
    family_of,
)
from rrfp_jax.weights.tables import HEAD, TensorNames
from rrfp_jax.weights.tensors import (
    FromFiles,
    Tensor,
    TensorSource,
    converted,
    files_of_tensors,
    first_few,
)


def architecture(folder: AnyPath) -> dict[str, Any]:
    """What the `config.json` of a published model says, as fields of our config.

        cfg = DecoderConfig(**rrfp.weights.architecture("Qwen3-4B/"), dtype=jnp.bfloat16)

    Args:
        folder: with the file.

    Raises:
        UsageError: there is none, of a family that is known and computed here.
    """
    return Model.of(path_of("weights.architecture: folder", folder)).fields


def published(folder: AnyPath, config: Any, *, first: int = 0) -> InitFunction:
    """The `init` of a `Trainer` that takes the parameters of a published model.

        init = rrfp.weights.published("Qwen3-4B/", cfg)

    Known are LLaMA 3 and Qwen3 for `Embed`, `Block` and `Head` of `models/decoder.py`; Mixtral with the
    `Block` of `models/moe.py`; ViT and SigLIP for `PatchEmbed`, `EncoderBlock` and the norm of `Project` of
    `models/vlm.py`. Each process reads the tensors of its own stages and no others.

    Args:
        folder: with `config.json` and safetensors files, as downloaded.
        config: of our layers; what `config.json` says must be equal. It may have other fields besides.
        first: the number of the first layer of this part of the model; layers that are not of it keep their
            own values, or get those of another part, see `together`.

    Raises:
        UsageError: it is no such folder, of no known family, or of another model than `config`; tensors are
            missing, or left over. So does the Trainer, if the pipeline's parameters are others than those of
            the model, or it ties what the model does not.
    """
    path = path_of("weights.published: folder", folder)
    model, where = Model.of(path), files_of_tensors(path)
    given = {name: getattr(config, name) for name in model.fields if hasattr(config, name)}
    if wrong := differences(model.fields, given):
        raise UsageError(f"the config does not fit {path / CONFIG}: {'; '.join(wrong)}")
    family, blocks = model.family, model.fields["n_layers"]
    firsts = [own.names[0] for own in family.table.first.values()]
    prefix = next((one for one in family.prefixes if any(one + name in where for name in firsts)), "")
    stored = family.stored(model.fields, first, prefix, model.tied)
    wanted = {name for own in stored.values() for name in own.names}
    missing = sorted(wanted - where.keys())
    computed = {name.replace("{}", str(b)) for name in family.table.computed for b in range(blocks)}
    others = where.keys() - wanted - computed
    not_needed = (*family.extra, HEAD) if model.tied else family.extra
    left = sorted(name for name in others if not name.startswith(not_needed))
    for names, what in ((missing, "lacks"), (left, "has, besides those of the model,")):
        if names:
            raise UsageError(f"{path}: {what} {len(names)} tensors: {first_few(names)}")
    tensors = {own: Tensor(of.names, of.arrangement.ours) for own, of in stored.items()}
    layers = range(first, first + blocks + 2)
    return Published.of(where, tensors.get, tensors, layers, family.layers.elsewhere)


def together(*inits: InitFunction) -> InitFunction:
    """The `init` of a `Trainer` that asks several, in this order, until one gives a parameter.

    init = rrfp.weights.together(published("siglip/", cfg.encoder), published("Qwen3/", cfg.decoder, first=9))
    """
    for one in inits:
        if not callable(one):
            raise UsageError(f"weights.together({one!r}): give functions init(path, spec) -> array or None")
    return Together(inits)


class Model(NamedTuple):
    """What a folder says of the model in it."""

    family: Family
    fields: dict[str, Any]  # of our config
    tied: bool  # whether embedding and head are one tensor

    @classmethod
    def of(cls, folder: Path) -> Model:
        """Raises UsageError where it cannot be read, or is not computed here."""
        try:
            config = _pixels(folder) | read_json(folder / CONFIG, dict)
            family = family_of(config)
            return cls(family, family.fields_of(config), bool(config.get("tie_word_embeddings", False)))
        except Unreadable as error:
            raise UsageError(f"{error}; give the folder of a published model, as downloaded") from None
        except UsageError as error:
            raise UsageError(f"{folder / CONFIG}: {error}") from None


@dataclass(frozen=True)
class Published(FromFiles):
    """An init function that knows its model: it gives the model's parameters, and None for others."""

    stored: Mapping[str, Tensor]  # of each parameter
    layers: range  # those of the model
    elsewhere: tuple[str, ...]  # beginnings of parameters of the last layer that keep their own values

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """Refuse other parameters than the model's, and ties that it does not have (`ModelCheckedInit`)."""
        kept = tuple(f"{self.layers[-1]}.{beginning}" for beginning in self.elsewhere)
        mine = {path for path in params if _layer(path) in self.layers}
        others = sorted(path for path in mine - self.stored.keys() if not path.startswith(kept))
        if lacking := sorted(self.stored.keys() - mine):
            raise UsageError(
                f"{self.where}: the pipeline lacks {len(lacking)} parameters of the published model: "
                f"{first_few(lacking)}; its layers are {self.layers[0]} to {self.layers[-1]}"
            )
        if others:
            raise UsageError(
                f"{self.where}: the published model lacks {len(others)} parameters of the pipeline's layers: "
                f"{first_few(others)}"
            )
        for alias, owner in owners.items():
            one, other = self.stored.get(owner), self.stored.get(alias)
            if one and other and one.names != other.names:
                raise UsageError(
                    f"{self.where}: the pipeline ties {owner} and {alias}, the published model has "
                    f"{one.names[0]!r} and {other.names[0]!r}; leave the tie out"
                )


@dataclass(frozen=True)
class Together:
    """Several init functions as one."""

    inits: tuple[InitFunction, ...]

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """What the first one gives that gives something."""
        return next((found for one in self.inits if (found := one(path, spec)) is not None), None)

    def source_of(self, path: str) -> str | None:
        """Of the first that gives the parameter, if no function before it might; see `SourcedInit`."""
        for one in self.inits:
            if not isinstance(one, SourcedInit):
                return None
            if (found := one.source_of(path)) is not None:
                return found
        return None

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """All those that know their model; see `ModelCheckedInit`."""
        for one in self.inits:
            if isinstance(one, ModelCheckedInit):
                one.check_model(params, owners)


def _pixels(folder: Path) -> dict[str, Any]:
    """How pixels are normalised, if a file says so; `UsageError` if our layers do it otherwise."""
    if not (folder / PIXELS).exists():
        return {}
    found = read_json(folder / PIXELS, dict)
    for key, value in COMPUTED_PIXELS.items():
        if found.get(key, value) != value:
            raise UsageError(f"{PIXELS}: {key}={shown(found[key])}: only {key}={value!r} is computed here")
    return {key: found[key] for key in ("image_mean", "image_std") if key in found}


_LAYERS = "n_layers"
"""The field by which the config of layers is known."""


class Publication(NamedTuple):
    """What is to be written."""

    sources: Sequence[TensorSource]
    others: Mapping[str, Any] = MappingProxyType({})  # JSON files, by name
    left_out: Sequence[str] = ()  # paths of parameters that are in none of them


@dataclass(frozen=True)
class Parameters:
    """Those of a checkpoint, read one by one."""

    checkpoint: CheckpointView
    dtype: np.dtype[Any] | None = None  # of floating-point values; None as they are stored

    @cached_property
    def keys(self) -> dict[str, Key]:
        """By path, such as "3.attention.query.kernel", in the order of layers."""
        keys = [key for key in self.checkpoint.leaves if key[0] == PARAMETERS]
        return {".".join(key[1:]): key for key in sorted(keys, key=lambda key: (int(key[1]), key[2:]))}

    def read(self, path: str) -> np.ndarray[Any, Any]:
        """One of them; `TrainingError` if a file is damaged, `UsageError` if a value is too large."""
        try:
            value = self.checkpoint.array(self.keys[path])
        except Damaged as error:
            raise TrainingError(f"{error}; give --step= of another checkpoint") from None
        dtype = self.dtype_of(path)
        try:
            return value if value.dtype == dtype else converted(value, dtype)
        except ValueError as error:
            raise UsageError(f"--dtype={dtype.name}: too small for {error} of {path}; leave it out") from None

    def dtype_of(self, path: str) -> np.dtype[Any]:
        """In which a parameter is given."""
        stored = dtype_of(self.checkpoint.leaves[self.keys[path]].dtype)
        assert stored is not None  # the manifest's schema has seen to that
        floating = jax.numpy.issubdtype(stored, jax.numpy.floating)
        return self.dtype if floating and self.dtype is not None else stored

    def source(self, path: str, stored: TensorNames) -> TensorSource:
        """What makes the public tensors of one of them."""
        nbytes = math.prod(self.checkpoint.leaves[self.keys[path]].shape) * self.dtype_of(path).itemsize
        return TensorSource(stored.names, nbytes, lambda: stored.arrangement.theirs(self.read(path)))


def as_family(
    params: Parameters, family: Family, first: int | None, fields: Mapping[str, Any]
) -> Publication:
    """The parameters of a published family's layers under its names, and its JSON files.

    The layers begin with number `first` (None if the model has no others) and have these fields of their
    config. `UsageError` if parameters or config are not the family's.
    """
    files, blocks = family.files_of(fields), int(fields["n_layers"])
    folder, begin = params.checkpoint.folder, first or 0
    table = family.stored(fields, begin, family.prefixes[0], tied=False)
    head, embedding = f"{begin + blocks + 1}.{TIED}", f"{begin}.{TIED}"
    paths = params.keys
    if missing := [path for path in table if path not in paths]:
        raise UsageError(
            f"{folder} lacks {len(missing)} parameters of {family.name} with {blocks} blocks from layer "
            f"{begin} on: {first_few(missing)}"
        )
    layers = range(begin, begin + blocks + 2)
    left_out = [path for path in paths if path not in table]
    kept = tuple(f"{layers[-1]}.{beginning}" for beginning in family.layers.elsewhere)
    wrong = [path for path in left_out if _layer(path) in layers and not path.startswith(kept)]
    outside = [path for path in left_out if _layer(path) not in layers] if first is None else []
    if others := wrong or outside:
        part = "" if wrong else "; for a part of a model give --first=, the number of the part's first layer"
        raise UsageError(f"{folder} has parameters besides those of {family.name}: {first_few(others)}{part}")
    if head in table:
        one, other = params.read(embedding), params.read(head)
        tied = one.dtype == other.dtype and one.tobytes() == other.tobytes()
        files[CONFIG]["tie_word_embeddings"] = tied
        if tied:
            del table[head]
    files[CONFIG]["torch_dtype"] = params.dtype_of(next(iter(table))).name
    sources = [params.source(path, stored) for path, stored in table.items()]
    return Publication(sources=sources, others=files, left_out=[p for p in left_out if p != head])


def fields_at(checkpoint: CheckpointView, place: str) -> Mapping[str, Any]:
    """The fields of the layers' config at a place such as "model.decoder" of that kept with a checkpoint."""
    found = checkpoint.run.config
    for name in place.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict) or _LAYERS not in found:
        ending = f".{_LAYERS}"
        names = [name for name, _ in flat(checkpoint.run.config) if name.endswith(ending)]
        there = ", ".join(name.removesuffix(ending) for name in names) or "none"
        lacks = f"no {_LAYERS!r} in the" if isinstance(found, dict) else "no"
        raise UsageError(
            f"{checkpoint.folder}: the config that is kept with it has {lacks} object {place!r} with the "
            f"sizes of the layers; give its name with --model= (it has: {there}). A script keeps one with "
            f'trainer.save(folder, config={{"model": dataclasses.asdict(cfg)}})'
        )
    return found


def _layer(path: str) -> int:
    return int(path.partition(".")[0])
