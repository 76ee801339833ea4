"""Documents as data for a Trainer: rows of one or two lengths in few shapes, padded or packed, and masked."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.buckets import (
    Cost,
    Costs,
    Fit,
    Pair,
    Pieces,
    Polynomial,
    Rows,
    cheapest,
    check_lengths,
    one_each,
    pack,
    rows_by_cost,
    rows_by_limits,
    unpack,
)
from rrfp_jax.data.contract import MOST_TOKENS, Arrays, Fields, Microbatch
from rrfp_jax.data.corpus import TEXT, Corpus, TokenizedDocument, reject_or_warn
from rrfp_jax.data.images import Patches
from rrfp_jax.data.sampling import (
    EMPTY,
    Draw,
    Drawn,
    Order,
    Split,
    check_counts,
    check_sampling,
    even_out,
    mix,
    ordered,
    planned,
)
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, says_its_arguments, shown

PATCH_FIELDS = {"patches": "uint8", "patch_places": "int32", "images": "int32"}
TEXT_FIELDS = {"tokens": "int32", "labels": "int32", "mask": "float32"}
IMAGE_FIELDS = {**PATCH_FIELDS, **TEXT_FIELDS, "patch_of_token": "int32"}
PACKED_FIELDS = {"segments": "int32", "positions": "int32"}


class Padding(NamedTuple):
    """Shares of the places of all rows of a split in which there is nothing."""

    patches: float
    tokens: float


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents as microbatches of few shapes: a `Data` for models of language, and of language and images.

    Fields, of B rows of T tokens by bucket:

    - `tokens` int32[B, T].
    - `labels` int32[B, T], the next tokens.
    - `mask` float32[B, T], 1 where there is a label.
    - packed also `segments` int32[B, T], which document of the row a token is of, from 1 on, and `positions`
      int32[B, T], its place in its piece; so that a model may keep documents apart.

    With images (`corpus.patches`) also, of P patches by bucket; a row's images lie one behind the other:

    - `patches` uint8[B, P, 3 * size**2]: pixels as they are; of a patch rows, then columns, then channels.
    - `patch_places` int32[B, P, 2]: row and column of a patch in its image's grid.
    - `images` int32[B, P]: which image of the row a patch is of, from 1 on; 0 for padding.
    - `patch_of_token` int32[B, T]: which merged patch of the row a token stands for; -1 for text and padding.
      With `merge=2` four patches in a row are one merged patch. Where an image stands tokens are 0, and there
      is no label where the next token is an image's. The token behind an image is a label.

    All others are 0 where there is nothing, which is at the ends of rows. A microbatch's weight is its number
    of labels.

    A text of n tokens is n - 1 predictions. One with more than the longest bucket has is cut, the pieces
    following on one another; none is dropped or cut short. Documents with images are never cut: one that is
    longer in either length than the longest bucket is a bad document, rejected or skipped as the corpus says.

    Attributes:
        corpus: the documents, of both splits; may be shared with other `Documents`.
        lengths: of buckets, or with images pairs (patches, tokens); or how to fit them to all documents.
        tokens: of a microbatch, padding and places of images included: as many rows as make at most so many,
            and at least one.
        patches: likewise, besides `tokens` or instead of it.
        rows: instead of both, of every microbatch, so that costs differ as lengths do.
        microbatches: per step.
        packed: documents share rows of the longest bucket, instead of one row each; then each row is in the
            smallest bucket that holds it. With images rows have the most patches and the most tokens of any
            bucket, and those that no bucket holds are taken apart.
        split: "train" for rows shuffled by (seed, epoch) forever, epoch after epoch without a gap (see
            `sampling.py`); "validation" for those held out, in order, all of them in `steps` steps.
        validation_share: of the documents, those whose index hashes lowest; at least one.
        seed: of the order.
        balance: what a row costs by its tokens, or with images in `Costs`; then microbatches of all buckets
            have as many rows as cost about the same as one of the longest, and in each step rows are dealt
            evenly to the microbatches of their bucket.
        order: of a step's microbatches, by the cost of their shapes (in patches and tokens, without
            `balance`).

    Raises:
        UsageError: an impossible setting, when made; bad or missing documents, when first planned.
    """

    corpus: Corpus
    lengths: tuple[int | Pair, ...] | Fit
    tokens: int | None = None
    patches: int | None = None
    rows: int | None = None
    microbatches: int
    packed: bool = False
    split: Split = "train"
    validation_share: float = 0.05
    seed: int = 0
    balance: Cost | None = None
    order: Order = "drawn"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patches is not None and not self._cut:
            raise UsageError(f"patches={self.patches}: the corpus has no images; give tokens or rows")
        sizes = {name: getattr(self, name) for name in (*reversed(self._counted), "rows")}
        check_counts("nothing" if self._cut else "no token", **sizes, microbatches=self.microbatches)
        if (self.rows is None) == (not any(self._limits)):
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            either = "the size of a microbatch, tokens, patches or both, or else rows"
            raise UsageError(f"{given}: give {either if self._cut else 'one, the size of a microbatch'}")
        check_sampling(self.split, self.validation_share, self.order)
        if self.balance is not None and isinstance(self.balance, Costs) != bool(self._cut):
            raise UsageError(f"balance={self.balance}: give {'Costs' if self._cut else 'a cost of tokens'}")
        if len(self._longest) != len(self._counted):
            raise UsageError(f"{self.lengths}: give longest={'(patches, tokens)' if self._cut else 'tokens'}")
        each = max((self.rows or 1) * sum(self._longest), *(limit or 0 for limit in self._limits))
        if (places := self.microbatches * each) > MOST_TOKENS:
            counted = " and ".join(self._counted)
            raise UsageError(f"{places} {counted} a step, padding included: give at most {MOST_TOKENS}")
        merged = self._cut.merge**2 if self._cut else 1
        fit: Any = self.lengths
        buckets = [fit.longest, fit.multiple] if isinstance(fit, Fit) else fit
        if odd := [patches for patches in (np.ravel(own)[0] for own in buckets) if patches % merged]:
            raise UsageError(
                f"{odd[0]} patches: {merged} of them are merged to one; make a bucket's patches, or "
                f"multiple=(patches, tokens) of a Fit, a multiple of {merged}"
            )

    # What a Trainer asks for.

    @property
    def steps(self) -> int:
        """Steps of a validation pass, which has every row once; of training's first epoch, rounded up.

        Rows of a bucket that fill no whole microbatch in that epoch come after it.
        """
        return self._draw.steps if self.split == "train" else self._draw.validation_steps

    @property
    def buckets(self) -> Sequence[Fields]:
        """The fields of every shape that a microbatch can have."""
        return [fields for fields, rows in zip(self._fields, self._draw.rows, strict=True) if rows]

    def plan(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` >= 0, a function of (seed, step, split) and the documents."""
        return [
            Microbatch(
                self._fields[bucket],
                source=(self.fingerprint, bucket, *rows.tolist()),
                weight=float(self._labels[rows[rows != EMPTY]].sum()),
            )
            for bucket, rows in self._drawn(step)
        ]

    def _drawn(self, step: int) -> list[Drawn]:
        """The microbatches of `step` >= 0: the bucket of each, and indices among all rows or `EMPTY`."""
        train = self.split == "train"
        draw = self._draw.training_step if train else self._draw.validation_step
        found = [(b, np.where(at == EMPTY, EMPTY, self._rows_of_bucket[b][at])) for b, at in draw(step)]
        if self._even is not None and train:
            for bucket in {bucket: None for bucket, _ in found}:
                own = [j for j, (of, _) in enumerate(found) if of == bucket]
                rows = np.concatenate([found[j][1] for j in own])
                for j, items in zip(own, even_out(self._even[rows], len(own)), strict=True):
                    found[j] = (bucket, rows[items])
        return [found[j] for j in ordered([self._costs[bucket] for bucket, _ in found], self.order)]

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; no more is read and decoded than they need.

        Raises:
            UsageError: an unknown field, a plan of other documents, or documents that have changed.
        """
        bucket, *rows = planned(microbatch, self.fingerprint, fields, self._dtypes, "documents")
        arrays = empty({name: self._fields[bucket][name] for name in fields})
        for r, row in enumerate(rows):
            if row != EMPTY:
                pieces = (self.corpus.piece(self.pieces, p, fields) for p in self.rows_of_split.pieces(row))
                fill_row({name: array[r] for name, array in arrays.items()}, pieces)
        return arrays

    # What there is, found once.

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with the rows made of them."""
        pieces, rows = self.pieces, self.rows_of_split
        digest = hashlib.blake2b(f"{self.corpus.fingerprint} {self.bucket_lengths}".encode(), digest_size=7)
        for array in (pieces.document, pieces.begin, rows.start, rows.order):
            digest.update(array.tobytes())
        return int.from_bytes(digest.digest())

    @functools.cached_property
    def bucket_lengths(self) -> tuple[Any, ...]:
        """Lengths of buckets by ascending size, given or fitted; pairs (patches, tokens) with images."""
        if not isinstance(self.lengths, Fit):
            return self._given
        every = self.corpus.pieces(self._usable, self._longest).size
        return self.lengths.lengths(pack(every, self._longest).size if self.packed else every, self._size)

    @property
    def padding(self) -> float | Padding:
        """The share of positions without a label, over all rows of the split; with images see `Padding`."""
        places = np.array(self.bucket_lengths)[self._bucket_of_row].sum(axis=0)
        share = 1 - self.rows_of_split.size.sum(axis=0) / places
        return Padding(*share.tolist()) if self._cut else float(share)

    @functools.cached_property
    def documents(self) -> NDArray[np.int64]:
        """Indices of the split's documents; the other split has none of them, whatever its lengths.

        Validation has those good ones whose index hashes lowest; training must have one.
        """
        usable, good, source = self._usable, self.corpus.good, self.corpus.source
        held = max(1, round(self.validation_share * len(good)))
        if held >= len(good):
            raise UsageError(
                f"{shown(source)}: {len(good)} usable documents cannot be split at "
                f"validation_share={self.validation_share}; give more of them"
            )
        lowest = good[np.argsort(mix(good.astype(np.uint64)), kind="stable")]
        of_split = lowest[held:] if self.split == "train" else lowest[:held]
        fitting = np.intersect1d(of_split, usable, assume_unique=True)
        if not len(fitting):
            raise UsageError(
                f"{shown(source)}: none of {len(of_split)} documents of the {self.split} split fits a "
                f"bucket: give longer buckets"
            )
        return fitting

    @functools.cached_property
    def pieces(self) -> Pieces:
        """Pieces of the split's documents."""
        return self.corpus.pieces(self.documents, self._row)

    @functools.cached_property
    def rows_of_split(self) -> Rows:
        """All rows of the split."""
        sizes = self.pieces.size
        if not self.packed:
            return one_each(sizes)
        rows = pack(sizes, self._row)  # which may be too long for any pair, though each document has one
        return unpack(rows, cheapest(rows.size, self.bucket_lengths, self._size) < 0, sizes)

    @functools.cached_property
    def _bucket_of_row(self) -> NDArray[np.int64]:
        return cheapest(self.rows_of_split.size, self.bucket_lengths, self._size)

    @functools.cached_property
    def _labels(self) -> NDArray[np.int64]:
        """Labels of each row, int64[R]."""
        return self.rows_of_split.summed(self.corpus.labels(self.pieces))

    @functools.cached_property
    def _taken(self) -> tuple[int, ...]:
        """How many rows of each bucket a microbatch has."""
        lengths, without = self.bucket_lengths, len(self._counted) * len(self.corpus.source.names)
        taken = (self.rows,) * len(lengths) if self.rows else rows_by_limits(lengths, self._limits, without)
        return taken if self.balance is None else rows_by_cost(lengths, taken[-1], self.balance)

    @functools.cached_property
    def _costs(self) -> list[float]:
        """The cost of a microbatch of each bucket."""
        of_row = (self.balance or self._size)(np.array(self.bucket_lengths))
        return (of_row * self._taken).tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def _rows_of_bucket(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self._bucket_of_row == bucket) for bucket in range(len(self.bucket_lengths))]

    @functools.cached_property
    def _draw(self) -> Draw:
        """Of positions among each bucket's rows."""
        return Draw(tuple(map(len, self._rows_of_bucket)), self._taken, self.microbatches, self.seed)

    @functools.cached_property
    def _even(self) -> NDArray[np.float64] | None:
        """The cost of each row, by which they are dealt evenly in training; None leaves them as drawn."""
        return None if self.balance is None else self.rows_of_split.summed(self.balance(self.pieces.size))

    @functools.cached_property
    def _fields(self) -> list[Fields]:
        """The fields of a microbatch of each bucket."""
        inner = {"patches": (self._cut.values,), "patch_places": (2,)} if self._cut else {}
        every: list[Fields] = []
        for taken, lengths in zip(self._taken, self.bucket_lengths, strict=True):
            *patches, tokens = np.ravel(lengths).tolist()
            size = {name: patches if name in PATCH_FIELDS else [tokens] for name in self._dtypes}
            shapes = {name: (taken, *own, *inner.get(name, ())) for name, own in size.items()}
            every.append({n: jax.ShapeDtypeStruct(shapes[n], dtype) for n, dtype in self._dtypes.items()})
        return every

    @functools.cached_property
    def _usable(self) -> NDArray[np.int64]:
        """Indices of good documents that a bucket holds, or that are cut for it."""
        good, longest = self.corpus.good, self._longest
        if not self._cut:
            return good
        sizes = self.corpus.sizes
        pairs = [longest] if isinstance(self.lengths, Fit) else self._given
        held = cheapest(sizes[good], pairs, self._size) >= 0
        reasons = {}
        for document in good[~held].tolist():
            over = [k for k, size in enumerate(sizes[document]) if size > longest[k]]
            beyond = [f"more {self._counted[k]} than the {longest[k]} of the longest bucket" for k in over]
            reasons[document] = f"with {[*beyond, 'patches and tokens that no bucket holds both'][0]}"
        if reasons:
            reject_or_warn(self.corpus.source.names, reasons, self.corpus.bad)
        if not held.any():
            raise UsageError(
                f"{shown(self.corpus.source)}: none of {len(good)} documents fits the longest bucket, "
                f"{longest[0]} patches and {longest[1]} tokens: give longer ones"
            )
        return good[held]

    # What differs with images.

    @property
    def _cut(self) -> Patches | None:
        return self.corpus.patches

    @property
    def _counted(self) -> Sequence[str]:
        """What a row's lengths count; each may be limited in a microbatch by the setting of that name."""
        return ("patches", "tokens") if self._cut else ("tokens",)

    @property
    def _limits(self) -> list[int | None]:
        return [getattr(self, name) for name in self._counted]

    @property
    def _dtypes(self) -> Mapping[str, str]:
        return (IMAGE_FIELDS if self._cut else TEXT_FIELDS) | (PACKED_FIELDS if self.packed else {})

    @property
    def _given(self) -> tuple[Any, ...]:
        """Buckets that are given, by ascending size."""
        found = check_lengths(self.lengths, len(self._counted))  # type: ignore[arg-type]
        order = np.argsort(self._size(np.array(found)), kind="stable")
        return tuple(found[i] for i in order)

    @property
    def _size(self) -> Cost:
        """What buckets are ordered by; rows go to the smallest that holds them."""
        return (self.balance or Costs()) if self._cut else Polynomial()

    @property
    def _longest(self) -> tuple[int, ...]:
        """The most that a row can have in each length, as far as settings tell."""
        if isinstance(self.lengths, Fit):
            return tuple(np.ravel(self.lengths.longest).tolist())
        return tuple(np.reshape(self._given, (-1, len(self._counted))).max(axis=0).tolist())

    @property
    def _row(self) -> tuple[int, ...]:
        """The most that rows are packed to."""
        return self._longest if self._cut else (self.bucket_lengths[-1],)


# Rows filled with documents.


def empty(fields: Fields) -> dict[str, NDArray[Any]]:
    """Arrays of these fields in which there is nothing yet."""
    nothing = {"patch_of_token": TEXT}
    return {name: np.full(own.shape, nothing.get(name, 0), own.dtype) for name, own in fields.items()}


def _places(document: Any) -> NDArray[np.int32]:
    return np.concatenate([np.zeros((0, 2), np.int32), *(document.cut.places(*g) for g in document.grids)])


def _patch_of_token(document: Any, behind: int) -> NDArray[np.int64]:
    kinds = document.patch[: document.places]
    return np.where(kinds == TEXT, TEXT, kinds + behind // document.cut.merge**2)


_FIELDS: Mapping[str, Callable[[TokenizedDocument, int, int, int], Any]] = {
    "tokens": lambda own, segment, patch, image: own.tokens[: own.places],
    "labels": lambda own, segment, patch, image: np.where(own.is_label, own.following, 0),
    "mask": lambda own, segment, patch, image: own.is_label,
    "segments": lambda own, segment, patch, image: segment,
    "positions": lambda own, segment, patch, image: np.arange(own.places),
    "images": lambda own, segment, patch, image: np.repeat(
        image + 1 + np.arange(len(own.counts)), own.counts
    ),
    "patches": lambda own, segment, patch, image: own.pixels and own.pixels(),
    "patch_places": lambda own, segment, patch, image: _places(own),
    "patch_of_token": lambda own, segment, patch, image: _patch_of_token(own, patch),
}
"""What a field has of a document behind so many patches and images of the row, or one value for all of it."""


def fill_row(row: Mapping[str, NDArray[Any]], documents: Iterable[TokenizedDocument]) -> None:
    """Put documents one behind the other into a row, whose arrays are views without the axis of rows."""
    patch = token = image = 0
    for segment, document in enumerate(documents, 1):
        patches, tokens = sum(document.counts), document.places
        for name, array in row.items():
            begin, size = (patch, patches) if name in PATCH_FIELDS else (token, tokens)
            array[begin : begin + size] = _FIELDS[name](document, segment, patch, image)
        patch, token, image = patch + patches, token + tokens, image + len(document.grids)
