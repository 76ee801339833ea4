"""Documents as data for a Trainer: rows of one or two lengths in few shapes, padded or packed, and masked."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.buckets import (
    BaseFit,
    Cost,
    Costing,
    Costs,
    Fit,
    FitBoth,
    Pair,
    Pieces,
    Polynomial,
    Rows,
    cheapest,
    check_lengths,
    check_pairs,
    one_each,
    pack,
    rows_by_cost,
    rows_by_limits,
    unpack,
)
from rrfp_jax.data.contract import MOST_TOKENS, Arrays, Microbatch
from rrfp_jax.data.corpus import TEXT, Corpus, ImageCorpus, TokenizedDocument, reject_or_warn
from rrfp_jax.data.sampling import (
    EMPTY,
    BatchSampler,
    Draw,
    Fields,
    Order,
    Split,
    check_counts,
    check_sampling,
    documents_of,
    planned,
)
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, shown

PATCH_FIELDS = {"patches": "uint8", "patch_places": "int32", "images": "int32"}
TEXT_FIELDS = {"tokens": "int32", "labels": "int32", "mask": "float32"}
IMAGE_FIELDS = {**PATCH_FIELDS, **TEXT_FIELDS, "patch_of_token": "int32"}
PACKED_FIELDS = {"segments": "int32", "positions": "int32"}


@dataclass(frozen=True, kw_only=True)
class BucketedDocuments(ABC):
    """`Documents` and `ImageDocuments`: documents become pieces, pieces rows, rows microbatches."""

    corpus: Corpus | ImageCorpus
    lengths: Any  # of buckets, or how to fit them
    tokens: int | None = None
    rows: int | None = None
    microbatches: int
    packed: bool = False
    split: Split = "train"
    validation_share: float = 0.05
    seed: int = 0
    balance: Any = None
    order: Order = "drawn"

    LENGTHS: ClassVar[tuple[str, ...]]
    """What a row's lengths count; each may be limited in a microbatch by the setting of that name."""

    FIELDS: ClassVar[Mapping[str, str]]
    """The dtype of every field of rows that are not packed."""

    NOTHING: ClassVar[str]
    EITHER: ClassVar[str]
    """What a step without rows would hold, and which settings give a microbatch's size; for messages."""

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = {name: getattr(self, name) for name in (*reversed(self.LENGTHS), "rows")}
        check_counts(self.NOTHING, **sizes)
        if (self.rows is None) == (not any(self._limits)):
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise UsageError(f"{given}: give {self.EITHER}")
        check_counts("no token", microbatches=self.microbatches)
        check_sampling(self.split, self.validation_share, self.order)
        each = max((self.rows or 1) * sum(self._longest), *(limit or 0 for limit in self._limits))
        if (places := self.microbatches * each) > MOST_TOKENS:
            counted = " and ".join(self.LENGTHS)
            raise UsageError(f"{places} {counted} a step, padding included: give at most {MOST_TOKENS}")

    # What a Trainer asks for.

    @property
    def steps(self) -> int:
        """Steps that hold every row once: a pass of validation; an epoch of training, rounded up."""
        return self._sampler.steps

    @property
    def buckets(self) -> Sequence[Fields]:
        """The fields of every shape that a microbatch can have."""
        return [fields for fields, rows in zip(self._fields, self._sampler.rows, strict=True) if len(rows)]

    def plan(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` >= 0, a function of (seed, step, split) and the documents."""
        return self._sampler.plan(step, self.fingerprint, self._fields, self._labels)

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; no more is read and decoded than they need.

        Raises:
            UsageError: an unknown field, a plan of other documents, or documents that have changed.
        """
        bucket, rows = planned(microbatch, self.fingerprint, fields, self._dtypes)
        specs = self._fields[bucket]
        arrays = empty({name: specs[name] for name in fields})
        for r, row in enumerate(rows):
            if row != EMPTY:
                self._fill_row({name: array[r] for name, array in arrays.items()}, row)
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
        if not isinstance(self.lengths, BaseFit):
            return self._given
        every = self.corpus.pieces(self._usable, self._longest).size
        return self.lengths.lengths(pack(every, self._longest).size if self.packed else every, self._size)

    @property
    def _usable(self) -> NDArray[np.int64]:
        """Indices of documents that can be in a split."""
        return self.corpus.good

    @functools.cached_property
    def documents(self) -> NDArray[np.int64]:
        """Indices of the split's documents."""
        return documents_of(self.split, self._usable, self.validation_share, self.corpus.source)

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

    @property
    def _padding(self) -> Any:
        """Shares of places with nothing in them, float64[] or float64[2] by length, of the split's rows."""
        places = np.array(self.bucket_lengths)[self._bucket_of_row].sum(axis=0)
        return 1 - self.rows_of_split.size.sum(axis=0) / places

    @functools.cached_property
    def _taken(self) -> tuple[int, ...]:
        """How many rows of each bucket a microbatch has."""
        lengths, without = self.bucket_lengths, len(self.LENGTHS) * len(self.corpus.source.names)
        taken = (self.rows,) * len(lengths) if self.rows else rows_by_limits(lengths, self._limits, without)
        return taken if self.balance is None else rows_by_cost(lengths, taken[-1], self.balance)

    @functools.cached_property
    def _sampler(self) -> BatchSampler:
        costs = (self.balance or self._size)(np.array(self.bucket_lengths)) * self._taken
        rows = [np.flatnonzero(self._bucket_of_row == bucket) for bucket in range(len(costs))]
        draw = Draw(tuple(map(len, rows)), self._taken, self.microbatches, self.seed)
        even = self.balance and self.rows_of_split.summed(self.balance(self.pieces.size))
        return BatchSampler(draw, rows, self.split, self.order, costs.tolist(), even)

    @property
    def _limits(self) -> list[int | None]:
        return [getattr(self, name) for name in self.LENGTHS]

    @property
    def _longest(self) -> tuple[int, ...]:
        """The most that a row can have in each length, as far as settings tell."""
        if isinstance(self.lengths, BaseFit):
            return self.lengths.longest_lengths
        return tuple(np.reshape(self._given, (-1, len(self.LENGTHS))).max(axis=0).tolist())

    @property
    def _row(self) -> tuple[int, ...]:
        """The most that rows are packed to."""
        return self._longest

    @property
    def _dtypes(self) -> Mapping[str, str]:
        return {**self.FIELDS, **PACKED_FIELDS} if self.packed else self.FIELDS

    @functools.cached_property
    def _fields(self) -> list[Fields]:
        """The fields of a microbatch of each bucket."""
        every: list[Fields] = []
        for taken, lengths in zip(self._taken, self.bucket_lengths, strict=True):
            *patches, tokens = np.ravel(lengths).tolist()
            shapes = {
                name: (taken, *(patches if name in PATCH_FIELDS else [tokens]), *self._inner(name))
                for name in self._dtypes
            }
            every.append({n: jax.ShapeDtypeStruct(shapes[n], dtype) for n, dtype in self._dtypes.items()})
        return every

    def _inner(self, field: str) -> tuple[int, ...]:
        """The shape of one patch or token in a field."""
        return ()

    def _fill_row(self, arrays: Mapping[str, NDArray[Any]], row: int) -> None:
        pieces = self.rows_of_split.pieces(row).tolist()
        fill_row(arrays, (self.corpus.piece(self.pieces, piece, arrays) for piece in pieces))

    @property
    @abstractmethod
    def _given(self) -> tuple[Any, ...]:
        """Buckets that are given, by ascending size."""

    @property
    @abstractmethod
    def _size(self) -> Costing:
        """What buckets are ordered by; rows go to the smallest that holds them."""


@dataclass(frozen=True, kw_only=True)
class Documents(BucketedDocuments):
    """Documents as microbatches of few shapes: a `Data` for language models.

    Fields, [rows, length] by bucket: `tokens` int32; `labels` int32, the next tokens; `mask` float32, 1 where
    there is a label. Packed also `segments` int32, which document of the row a token is of, from 1 on, and
    `positions` int32, its place in its piece; so that a model may keep documents apart. All are 0 where there
    is nothing, which is at the ends of rows. A microbatch's weight is its number of labels.

    A document of n tokens is n - 1 predictions. One with more than the longest bucket has is cut, the pieces
    following on one another; none is dropped or cut short.

    Attributes:
        corpus: the documents, of both splits; may be shared with other `Documents`.
        lengths: of buckets, or how to fit them to all documents.
        tokens: of a microbatch, padding included: as many rows as make at most so many, and at least one.
        rows: instead of `tokens`, of every microbatch, so that costs differ as lengths do.
        microbatches: per step.
        packed: pieces share rows of the longest bucket, instead of one row each; then each row is in the
            smallest bucket that holds it.
        split: "train" for rows shuffled by (seed, epoch) for ever, epoch after epoch without a gap (see
            `sampling.py`); "validation" for those held out, in order, all of them in `steps` steps.
        validation_share: of the documents, those whose index hashes lowest; at least one.
        seed: of the order.
        balance: what a row costs by its tokens; then microbatches of all buckets have as many rows as cost
            about the same as one of the longest, and in each step rows are dealt evenly to the microbatches
            of their bucket.
        order: of a step's microbatches, by the cost of their shapes (in tokens, without `balance`).

    Raises:
        UsageError: an impossible setting, when made; bad or missing documents, when first planned.
    """

    corpus: Corpus
    lengths: tuple[int, ...] | Fit
    balance: Cost | None = None

    LENGTHS = ("tokens",)
    FIELDS = TEXT_FIELDS
    NOTHING, EITHER = "no token", "one, the size of a microbatch"

    @property
    def padding(self) -> float:
        """The share of positions without a label, over all rows of the split."""
        return float(self._padding)

    @property
    def _given(self) -> tuple[int, ...]:
        return check_lengths(self.lengths)  # type: ignore[arg-type]

    @property
    def _row(self) -> tuple[int, ...]:
        return (self.bucket_lengths[-1],)

    @property
    def _size(self) -> Costing:
        return Polynomial()


class Padding(NamedTuple):
    """Shares of the places of all rows of a split in which there is nothing."""

    patches: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class ImageDocuments(BucketedDocuments):
    """Documents of text and images as microbatches of few shapes: a `Data` for vision-language models.

    Fields, of B rows, P patches and T tokens by bucket; a row's images lie one behind the other:

    - `patches` uint8[B, P, 3 * size**2]: pixels as they are; of a patch rows, then columns, then channels.
    - `patch_places` int32[B, P, 2]: row and column of a patch in its image's grid.
    - `images` int32[B, P]: which image of the row a patch is of, from 1 on; 0 for padding.
    - `tokens`, `labels` int32[B, T], `mask` float32[B, T]: as in `Documents`. Where an image stands tokens
      are 0, and there is no label where the next token is an image's. The token behind an image is a label.
    - `patch_of_token` int32[B, T]: which merged patch of the row a token stands for; -1 for text and padding.
    - packed also `segments` and `positions` int32[B, T], as in `Documents`.

    All others are 0 where there is nothing. With `merge=2` four patches in a row are one merged patch. A
    microbatch's weight is its number of labels. Documents are never cut: one that is longer in either length
    than the longest bucket is a bad document, refused or skipped as the corpus says.

    Attributes:
        corpus: the documents, of both splits; may be shared with other `ImageDocuments`.
        lengths: of buckets, pairs (patches, tokens), or how to fit them to all documents.
        tokens: of a microbatch, padding and places of images included: at most so many, but at least one row.
        patches: likewise, besides `tokens` or instead of it.
        rows: instead of both, of every microbatch.
        microbatches: per step.
        packed: documents share rows of the most patches and tokens, instead of one row each; then each row is
            in the cheapest bucket that holds it. Rows that no bucket holds are taken apart.
        split, validation_share, seed: as in `Documents`.
        balance: what a row costs by both lengths; then microbatches of all buckets have as many rows as cost
            about the same as one of the dearest, and in each step rows are dealt evenly to the microbatches
            of their bucket.
        order: of a step's microbatches, by the cost of their shapes (patches and tokens, without `balance`).

    Raises:
        UsageError: an impossible setting, when made; bad or missing documents, when first planned.
    """

    corpus: ImageCorpus
    lengths: tuple[Pair, ...] | FitBoth
    patches: int | None = None
    balance: Costs | None = None

    LENGTHS = ("patches", "tokens")
    FIELDS = IMAGE_FIELDS
    NOTHING, EITHER = "nothing", "the size of a microbatch, tokens, patches or both, or else rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        merged, fit = self.corpus.patches.merge**2, self.lengths
        given = [fit.patches, fit.patch_multiple] if isinstance(fit, FitBoth) else [own[0] for own in fit]
        if odd := [patches for patches in given if patches % merged]:
            raise UsageError(
                f"{odd[0]} patches: {merged} of them are merged to one; make a bucket's patches, or "
                f"patch_multiple, a multiple of {merged}"
            )

    @property
    def padding(self) -> Padding:
        """Over all rows of the split."""
        return Padding(*self._padding.tolist())

    @property
    def _given(self) -> tuple[Pair, ...]:
        pairs = check_pairs(self.lengths)  # type: ignore[arg-type]
        return tuple(pairs[i] for i in np.argsort(self._size(np.array(pairs)), kind="stable"))

    @property
    def _size(self) -> Costing:
        return self.balance or Costs()

    @functools.cached_property
    def _usable(self) -> NDArray[np.int64]:
        """Indices of good documents that a bucket holds; the corpus says what is done with longer ones."""
        good, sizes, longest = self.corpus.good, self.corpus.sizes, self._longest
        pairs = [longest] if isinstance(self.lengths, FitBoth) else self._given
        held = cheapest(sizes[good], pairs, self._size) >= 0
        if reasons := {d: self._too_long(sizes[d]) for d in good[~held].tolist()}:
            reject_or_warn(self.corpus.source.names, reasons, self.corpus.bad)
        if not held.any():
            raise UsageError(
                f"{shown(self.corpus.source)}: none of {len(good)} documents fits the longest bucket, "
                f"{longest[0]} patches and {longest[1]} tokens: give longer ones"
            )
        return good[held]

    def _too_long(self, size: NDArray[np.int64]) -> str:
        for length, most, what in zip(size, self._longest, self.LENGTHS, strict=True):
            if length > most:
                return f"with more {what} than the {most} of the longest bucket"
        return "with patches and tokens that no bucket holds both"

    def _inner(self, field: str) -> tuple[int, ...]:
        return {"patches": (self.corpus.patches.values,), "patch_places": (2,)}.get(field, ())


# Rows filled with documents.


def empty(fields: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, NDArray[Any]]:
    """Arrays of these fields in which there is nothing yet."""
    return {
        name: np.full(spec.shape, TEXT if name == "patch_of_token" else 0, spec.dtype)
        for name, spec in fields.items()
    }


def fill_row(row: Mapping[str, NDArray[Any]], documents: Iterable[TokenizedDocument]) -> None:
    """Put documents one behind the other into a row, whose arrays are views without the axis of rows."""
    patch = token = image = 0
    for segment, document in enumerate(documents, 1):
        patches, tokens = sum(document.counts), document.places
        for name, array in row.items():
            if name in PATCH_FIELDS:
                array[patch : patch + patches] = _of_patches(name, document, image)
            else:
                array[token : token + tokens] = _of_tokens(name, document, tokens, segment, patch)
        patch, token, image = patch + patches, token + tokens, image + len(document.grids)


def _of_patches(name: str, document: TokenizedDocument, image: int) -> NDArray[Any]:
    """A field of patches, [P] or [P, ...] of the document; behind so many images of the row."""
    assert document.cut is not None and document.pixels is not None
    match name:
        case "patches":
            return document.pixels()
        case "patch_places":
            places = [document.cut.places(*grid) for grid in document.grids]
            return np.concatenate([np.zeros((0, 2), np.int32), *places])
        case _:
            counts = document.counts
            return np.repeat(np.arange(image + 1, image + len(counts) + 1), counts)


def _of_tokens(name: str, document: TokenizedDocument, size: int, segment: int, patch: int) -> Any:
    """A field of `size` tokens, or one value for all of the document; behind so many patches of the row."""
    kinds, following = document.patch, document.tokens[1:]
    match name:
        case "tokens":
            return document.tokens[:size]
        case "labels":
            return (
                following if kinds is None else np.where(document.is_label, np.append(following, 0)[:size], 0)
            )
        case "mask":
            return 1 if kinds is None else document.is_label
        case "patch_of_token":
            assert kinds is not None and document.cut is not None
            return np.where(kinds[:size] == TEXT, TEXT, kinds[:size] + patch // document.cut.merge**2)
        case "segments":
            return segment
        case _:
            return np.arange(size)
