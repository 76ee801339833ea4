"""Initial parameters from published models, by the names of their families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.families.family import CONFIG, PIXELS, Family, differences
from rrfp_jax.families.known import family_of
from rrfp_jax.families.tables import HEAD, Stored
from rrfp_jax.fields import path_of, shown
from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.runtime.programs.initial import InitFunction, ModelCheckedInit
from rrfp_jax.train.pretrained import TensorFiles
from rrfp_jax.train.stored import MOST_TOLD, Tensor, some

_PIXELS = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
"""The only values that these keys of `preprocessor_config.json` may have, if they are there."""


def architecture(folder: str | PathLike[str]) -> dict[str, Any]:
    """What the `config.json` of a published model says, as fields of our config.

        cfg = DecoderConfig(**rrfp.weights.architecture("Qwen3-4B/"), dtype=jnp.bfloat16)

    Args:
        folder: with the file.

    Raises:
        UsageError: there is none, of a family that is known and computed here.
    """
    return Model.of(path_of("weights.architecture: folder", folder)).fields


def published(folder: str | PathLike[str], config: Any, *, first: int = 0) -> InitFunction:
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
    model, files = Model.of(path), TensorFiles.of(path)
    given = {name: getattr(config, name) for name in model.fields if hasattr(config, name)}
    if wrong := differences(model.fields, given):
        raise UsageError(f"the config does not fit {path / CONFIG}: {'; '.join(wrong)}")
    family, blocks = model.family, model.fields["n_layers"]
    prefix = next((one for one in family.prefixes if _begins(files.where, one, family)), "")
    stored = family.stored(model.fields, first, prefix, model.tied)
    wanted = {name for own in stored.values() for name in own.names}
    missing = sorted(wanted - files.where.keys())
    others = files.where.keys() - wanted - family.table.computed_names(blocks)
    left = sorted(name for name in others if not name.startswith(model.not_needed))
    for names, what in ((missing, "lacks"), (left, "has, besides those of the model,")):
        if names:
            raise UsageError(f"{path}: {what} {len(names)} tensors: {some(names[:MOST_TOLD], len(names))}")
    return Published(files, stored, range(first, first + blocks + 2), family.elsewhere)


def together(*inits: InitFunction) -> InitFunction:
    """The `init` of a `Trainer` that asks several, in this order, until one gives a parameter.

    init = rrfp.weights.together(published("siglip/", cfg.encoder), published("Qwen3/", cfg.decoder, first=9))
    """
    for one in inits:
        if not callable(one):
            raise UsageError(f"weights.together({one!r}): give functions init(path, spec) -> array or None")
    return Together(inits)


@dataclass(frozen=True)
class Model:
    """What a folder says of the model in it.

    Attributes:
        family: that it is of.
        fields: of our config.
        tied: whether embedding and head are one tensor.
    """

    family: Family
    fields: dict[str, Any]
    tied: bool

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

    @property
    def not_needed(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that may be there, too."""
        return (*self.family.extra, HEAD) if self.tied else self.family.extra


@dataclass(frozen=True)
class Published:
    """An init function that knows its model.

    Attributes:
        files: with the tensors.
        stored: the tensors of each parameter.
        layers: those of the model.
        elsewhere: beginnings of the paths of parameters of the last layer that keep their own values.
    """

    files: TensorFiles
    stored: Mapping[str, Stored]
    layers: range
    elsewhere: tuple[str, ...]

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """A parameter of the model; None for others. Raises as `FromTensors` does."""
        return self.files.init(self._tensor)(path, spec)

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """Refuse other parameters than the model's, and ties that it does not have (`ModelCheckedInit`)."""
        kept = tuple(f"{self.layers[-1]}.{beginning}" for beginning in self.elsewhere)
        mine = {path for path in params if int(path.partition(".")[0]) in self.layers}
        others = sorted(path for path in mine - self.stored.keys() if not path.startswith(kept))
        if lacking := sorted(self.stored.keys() - mine):
            raise UsageError(
                f"{self.files}: the pipeline lacks {len(lacking)} parameters of the published model: "
                f"{some(lacking[:MOST_TOLD], len(lacking))}; its layers are "
                f"{self.layers[0]} to {self.layers[-1]}"
            )
        if others:
            raise UsageError(
                f"{self.files}: the published model lacks {len(others)} parameters of the pipeline's layers: "
                f"{some(others[:MOST_TOLD], len(others))}"
            )
        for alias, owner in owners.items():
            one, other = self.stored.get(owner), self.stored.get(alias)
            if one and other and one.names != other.names:
                raise UsageError(
                    f"{self.files}: the pipeline ties {owner} and {alias}, the published model has "
                    f"{one.names[0]!r} and {other.names[0]!r}; leave the tie out"
                )

    def _tensor(self, path: str) -> Tensor | None:
        own = self.stored.get(path)
        return None if own is None else Tensor(own.names, own.arrangement.ours)


@dataclass(frozen=True)
class Together:
    """Several init functions as one."""

    inits: tuple[InitFunction, ...]

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """What the first one gives that gives something."""
        return next((found for one in self.inits if (found := one(path, spec)) is not None), None)

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """All those that know their model; see `ModelCheckedInit`."""
        for one in self.inits:
            if isinstance(one, ModelCheckedInit):
                one.check_model(params, owners)


def _pixels(folder: Path) -> dict[str, Any]:
    """How pixels are normalised, which has a file of its own, if any.

    Raises:
        UsageError: otherwise than our layers do it.
    """
    if not (folder / PIXELS).exists():
        return {}
    found = read_json(folder / PIXELS, dict)
    for key, value in _PIXELS.items():
        if found.get(key, value) != value:
            raise UsageError(f"{PIXELS}: {key}={shown(found[key])}: only {key}={value!r} is computed here")
    return {key: found[key] for key in ("image_mean", "image_std") if key in found}


def _begins(names: Collection[str], prefix: str, family: Family) -> bool:
    """Whether names of tensors have this prefix."""
    return any(prefix + own.names[0] in names for own in family.table.first.values())
