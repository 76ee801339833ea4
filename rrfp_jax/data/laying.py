"""Puts documents of text and images into the arrays of a row, one behind the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.image_corpus import TEXT, ImageCorpus, Laid
from rrfp_jax.data.images import Patches

_OF_PATCHES = {"patches": "uint8", "patch_places": "int32", "images": "int32"}
_OF_TOKENS = {"tokens": "int32", "labels": "int32", "mask": "float32", "patch_of_token": "int32"}
DTYPES = _OF_PATCHES | _OF_TOKENS
PACKED_DTYPES = {"segments": "int32", "positions": "int32"}


def empty(fields: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, NDArray[Any]]:
    """Arrays of these fields in which there is nothing yet."""
    return {
        name: np.full(spec.shape, TEXT if name == "patch_of_token" else 0, spec.dtype)
        for name, spec in fields.items()
    }


def lay(corpus: ImageCorpus, documents: Sequence[int], row: Mapping[str, NDArray[Any]]) -> None:
    """Put documents into a row, whose arrays are views without the axis of rows; see `ImageDocuments`."""
    patch = token = image = 0
    merge = corpus.patches.merge**2
    for segment, document in enumerate(documents, 1):
        laid = corpus.document(document)
        patches, tokens = sum(map(corpus.patches.count, laid.grids)), laid.places
        for name in _OF_PATCHES.keys() & row.keys():
            own = row[name][patch : patch + patches]
            if name == "patches":
                own[:] = corpus.pixels(document)
            else:
                own[:] = _of_patches(name, laid, corpus.patches, image)
        for name in row.keys() - _OF_PATCHES.keys():
            row[name][token : token + tokens] = _of_tokens(name, laid, segment, patch // merge)
        patch, token, image = patch + patches, token + tokens, image + len(laid.grids)


def _of_patches(name: str, laid: Laid, patches: Patches, image: int) -> NDArray[Any]:
    """Places, or numbers of images after those there are already; int32[P, 2] or int32[P]."""
    if name == "patch_places":
        places = [patches.places(*grid) for grid in laid.grids]
        return np.concatenate([np.zeros((0, 2), np.int32), *places])
    sizes = [patches.count(grid) for grid in laid.grids]
    return np.repeat(np.arange(image + 1, image + len(sizes) + 1), sizes)


def _of_tokens(name: str, laid: Laid, segment: int, merged: int) -> NDArray[Any]:
    """A field of tokens, [T] of the document; behind so many merged patches of the row."""
    size = laid.places
    following = laid.tokens[1 : size + 1]
    label = np.zeros(size, bool)  # the last token of an image at the end has no next one
    label[: len(following)] = laid.patch[1 : size + 1] == TEXT
    match name:
        case "tokens":
            return laid.tokens[:size]
        case "labels":
            return np.where(label, np.append(following, 0)[:size], 0)
        case "mask":
            return label
        case "patch_of_token":
            own = laid.patch[:size]
            return np.where(own == TEXT, TEXT, own + merged)
        case "segments":
            return np.full(size, segment)
        case _:
            return np.arange(size)
