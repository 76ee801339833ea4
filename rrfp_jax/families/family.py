"""A published family: its table of names, and what its `config.json` says of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rrfp_jax.errors import UsageError
from rrfp_jax.families.tables import Stored, Table
from rrfp_jax.fields import shown

CONFIG, PIXELS = "config.json", "preprocessor_config.json"
"""The files of a model; the second says how images become its input."""

Json: TypeAlias = Mapping[str, Any]
"""An object of `config.json`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is known of one.

    Attributes:
        name: as `rrfp-export --as` has it.
        model_types, architecture: in `config.json`; the first is written.
        table: of its tensors.
        sizes: the key of each field of our config that may differ between its models, see `completed`.
        fixed: the other fields of our config, and the value that they have in all its models.
        understood: the only value that a key may have, if it is there: with another one a model computes
            what our layers do not. They are written, too.
        inner: the key of the object that says it all, where a `config.json` has one.
        defaults: of keys that a `config.json` may leave out.
        completed: of a `config.json`, all keys of `sizes`, whichever form the file has; raises UsageError.
        reduced: of these keys, those of a file.
        processor: of these keys, what `preprocessor_config.json` says of images; empty for other models.
        prefixes: what the names of all tensors may begin with; that of files we write is the first.
        extra: beginnings of the names of tensors that our layers have no use for.
        elsewhere: beginnings of the paths of parameters in the last layer that are not of the family.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    table: Table
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    understood: Json
    completed: Callable[[Json], Json]
    reduced: Callable[[Json], Json]
    processor: Callable[[Json], Json] = lambda config: {}
    inner: str = ""
    defaults: Json = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    extra: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def fields_of(self, config: Json) -> dict[str, Any]:
        """The fields of our config, by its `config.json`.

        Raises:
            UsageError: it lacks a key, or says something that our layers do not compute.
        """
        inner = config.get(self.inner)
        config = {**self.defaults, **config, **(inner if isinstance(inner, dict) else {})}
        for key, value in self.understood.items():
            if config.get(key, value) != value:
                raise UsageError(
                    f"{key}={shown(config[key])}: of {self.name} only {key}={value!r} is computed here"
                )
        found = self.completed(config)
        return {ours: found[key] for ours, key in self.sizes.items()} | dict(self.fixed)

    def files_of(self, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What `config.json` says of a model with these fields, and the file beside it; see `fields_of`.

        Raises:
            UsageError: no model of the family has such fields; names them.
        """
        wrong = differences(dict(self.fixed), fields)
        if not wrong:
            absent = [ours for ours in self.sizes if ours not in fields]
            if absent:
                raise UsageError(f"no model of {self.name} is so: there is no {', '.join(absent)}")
            sizes = {key: fields[ours] for ours, key in self.sizes.items()}
            named = {"architectures": [self.architecture], "model_type": self.model_types[0]}
            config, pixels = {**named, **self.understood, **self.reduced(sizes)}, dict(self.processor(sizes))
            wrong = differences(self.fields_of(pixels | config), fields)
        if wrong:
            raise UsageError(f"no model of {self.name} is so: {'; '.join(wrong)}")
        return {CONFIG: config, PIXELS: pixels} if pixels else {CONFIG: config}

    def stored(self, fields: Mapping[str, Any], first: int, prefix: str, tied: bool) -> dict[str, Stored]:
        """The tensors of every parameter, see `Table.of_layers`; a tied head has the embedding's."""
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
