"""Which characters of a name do not follow from its beginning, as a field of microbatches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

import rrfp_jax as rrfp
from configs.characters import END


@dataclasses.dataclass(frozen=True)
class OpenCharacters:
    """Documents of `Characters` with the field `open` float32[B, T]: 1 where a picture could help.

    That is where the names of training that begin as this one go on with more than one character, or where
    none begins so. All other characters can be told without a picture by whoever knows those names.
    """

    documents: rrfp.data.Documents

    @property
    def steps(self) -> int:
        """See `Documents`."""
        return self.documents.steps

    @property
    def buckets(self) -> Sequence[Mapping[str, jax.ShapeDtypeStruct]]:
        """See `Documents`."""
        return [_with_open(fields) for fields in self.documents.buckets]

    def plan(self, step: int) -> Sequence[rrfp.Microbatch]:
        """See `Documents`."""
        planned = self.documents.plan(step)
        return [dataclasses.replace(mb, fields=_with_open(mb.fields)) for mb in planned]

    def load(self, microbatch: rrfp.Microbatch, fields: Collection[str]) -> Mapping[str, np.ndarray]:
        """See `Documents`."""
        others = sorted({*fields, "labels", "mask"} - {"open"}) if "open" in fields else fields
        arrays = dict(self.documents.load(microbatch, others))
        if "open" in fields:
            arrays["open"] = np.zeros_like(arrays["mask"])
            for labels, mask, marks in zip(arrays["labels"], arrays["mask"], arrays["open"], strict=True):
                marks[:] = self._open(labels, mask)
        return {name: arrays[name] for name in fields}

    def _open(self, labels: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Of a row: float32[T]."""
        marks, begun = np.zeros_like(mask), ""
        for at in np.flatnonzero(mask).tolist():
            character = chr(labels[at])
            marks[at] = len(self._following.get(begun, ())) != 1
            begun = "" if character == END else begun + character
        return marks

    @functools.cached_property
    def _following(self) -> Mapping[str, set[str]]:
        """What comes behind each beginning of the names of training."""
        found: dict[str, set[str]] = {}
        train = dataclasses.replace(self.documents, split="train")
        for document in train.documents.tolist():
            for name in train.corpus.source.read(document)[1::2]:
                for at, character in enumerate(name):
                    found.setdefault(name[:at], set()).add(character)
        return found


def _with_open(fields: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {**fields, "open": fields["mask"]}
