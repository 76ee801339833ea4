"""Documents of text and images as data for a Trainer: rows of two lengths, in few shapes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.bad import judge
from rrfp_jax.data.balance import Order
from rrfp_jax.data.contract import MOST_TOKENS, Arrays, Microbatch
from rrfp_jax.data.dealing import Dealing, Fields, Split, check_dealing, documents_of, planned
from rrfp_jax.data.draw import EMPTY
from rrfp_jax.data.image_corpus import ImageCorpus
from rrfp_jax.data.laying import DTYPES, PACKED_DTYPES, empty, lay
from rrfp_jax.data.rows import Rows, one_each
from rrfp_jax.data.two_lengths import Costs, FitBoth, Pair, cheapest, check_pairs, packed_pairs
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, shown


class Padding(NamedTuple):
    """Shares of the places of all rows of a split in which there is nothing."""

    patches: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class ImageDocuments:
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
        packed: documents share rows of the largest bucket, instead of one row each; then each row is in the
            cheapest bucket that holds it.
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
    tokens: int | None = None
    patches: int | None = None
    rows: int | None = None
    microbatches: int
    packed: bool = False
    split: Split = "train"
    validation_share: float = 0.05
    seed: int = 0
    balance: Costs | None = None
    order: Order = "drawn"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tokens", "patches", "rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name}={value}: a step would hold nothing; give {name} >= 1")
        if (self.rows is None) == (self.tokens is None and self.patches is None):
            raise UsageError(
                f"tokens={self.tokens}, patches={self.patches}, rows={self.rows}: give the size of a "
                f"microbatch, tokens, patches or both, or else rows"
            )
        check_dealing(self.microbatches, self.split, self.validation_share, self.order)
        each = max((self.rows or 1) * sum(self._largest), self.tokens or 0, self.patches or 0)
        if (places := self.microbatches * each) > MOST_TOKENS:
            raise UsageError(
                f"{places} patches and tokens a step, padding included: give at most {MOST_TOKENS}"
            )
        self._check_merging()

    def _check_merging(self) -> None:
        """Refuse buckets whose patches cannot be merged."""
        merged = self.corpus.patches.merge**2
        given = [patches for patches, _ in self.lengths] if isinstance(self.lengths, tuple) else []
        if isinstance(self.lengths, FitBoth):
            given = [self.lengths.patches, self.lengths.patch_multiple]
        if odd := [patches for patches in given if patches % merged]:
            raise UsageError(
                f"{odd[0]} patches: {merged} of them are merged to one; make a bucket's patches, or "
                f"patch_multiple, a multiple of {merged}"
            )

    @property
    def _largest(self) -> Pair:
        """Of either length, the most that a row can have."""
        if isinstance(self.lengths, FitBoth):
            return self.lengths.patches, self.lengths.tokens
        patches, tokens = zip(*check_pairs(self.lengths), strict=True)
        return max(patches), max(tokens)

    @property
    def steps(self) -> int:
        """Steps that hold every row once: a pass of validation; an epoch of training, rounded up."""
        return self._dealing.steps

    @property
    def buckets(self) -> Sequence[Fields]:
        """The fields of every shape that a microbatch can have."""
        return [self._fields(bucket) for bucket, rows in enumerate(self._rows_in) if len(rows)]

    @functools.cached_property
    def bucket_lengths(self) -> tuple[Pair, ...]:
        """(patches, tokens) by ascending cost; given or fitted."""
        if isinstance(self.lengths, FitBoth):
            sizes = self._sizes[self._usable]
            rows = packed_pairs(sizes, self._largest).size if self.packed else sizes
            return self.lengths.pairs(rows, self._costs)
        pairs = check_pairs(self.lengths)
        return tuple(pairs[i] for i in np.argsort(self._costs(np.array(pairs)), kind="stable"))

    @property
    def padding(self) -> Padding:
        """Over all rows of the split."""
        places = np.array(self.bucket_lengths)[self._bucket_of_row].sum(axis=0)
        patches, tokens = (1 - self.rows_of_split.size.sum(axis=0) / places).tolist()
        return Padding(patches, tokens)

    def plan(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` >= 0, a function of (seed, step, split) and the documents."""
        return self._dealing.plan(step, self.fingerprint, self._fields, self._labels)

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; images are decoded only for `patches`.

        Raises:
            UsageError: an unknown field, a plan of other documents, or documents that have changed.
        """
        bucket, rows = planned(microbatch, self.fingerprint, fields, self._dtypes)
        arrays = empty({name: self._fields(bucket)[name] for name in fields})
        for r, row in enumerate(rows):
            if row != EMPTY:
                own = self.documents[self.rows_of_split.pieces(row)].tolist()
                lay(self.corpus, own, {name: array[r] for name, array in arrays.items()})
        return arrays

    # What there is, found once.

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with the rows made of them."""
        rows = self.rows_of_split
        digest = hashlib.blake2b(f"{self.corpus.fingerprint} {self.bucket_lengths}".encode(), digest_size=7)
        for array in (self.documents, rows.start, rows.order):
            digest.update(array.tobytes())
        return int.from_bytes(digest.digest())

    @functools.cached_property
    def documents(self) -> NDArray[np.int64]:
        """Indices of the split's documents."""
        return documents_of(self.split, self._usable, self.validation_share, self.corpus.source)

    @functools.cached_property
    def rows_of_split(self) -> Rows:
        """All rows of the split, of pieces that are indices into `documents`; their size is int64[R, 2]."""
        sizes = self._sizes[self.documents]
        return packed_pairs(sizes, self._largest) if self.packed else one_each(sizes)

    @functools.cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """int64[N, 2]: patches and tokens of every document."""
        return np.stack([self.corpus.lengths.patches, self.corpus.lengths.tokens], axis=1)

    @functools.cached_property
    def _usable(self) -> NDArray[np.int64]:
        """Indices of good documents that a bucket holds; the corpus says what is done with longer ones."""
        good = np.flatnonzero(self.corpus.lengths.labels)
        pairs = (self._largest,) if self.packed or isinstance(self.lengths, FitBoth) else self.lengths
        held = cheapest(self._sizes[good], pairs, self._costs) >= 0
        reasons = {d: self._too_long(self._sizes[d]) for d in good[~held].tolist()}
        if reasons:
            judge(self.corpus.source.names, reasons, self.corpus.bad)
        if not held.any():
            raise UsageError(
                f"{shown(self.corpus.source)}: none of {len(good)} documents fits the longest bucket, "
                f"{self._largest[0]} patches and {self._largest[1]} tokens: give longer ones"
            )
        return good[held]

    def _too_long(self, size: NDArray[np.int64]) -> str:
        for length, most, what in zip(size, self._largest, ("patches", "tokens"), strict=True):
            if length > most:
                return f"with more {what} than the {most} of the longest bucket"
        return "with patches and tokens that no bucket holds both"

    @functools.cached_property
    def _bucket_of_row(self) -> NDArray[np.int64]:
        return cheapest(self.rows_of_split.size, self.bucket_lengths, self._costs)

    @functools.cached_property
    def _rows_in(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self._bucket_of_row == bucket) for bucket in range(len(self.bucket_lengths))]

    @functools.cached_property
    def _taken(self) -> tuple[int, ...]:
        most = [
            self.rows
            or min(
                self.patches // patches if self.patches else self._sizes.size,
                self.tokens // tokens if self.tokens else self._sizes.size,
            )
            for patches, tokens in self.bucket_lengths
        ]
        if self.balance is not None:
            each = self.balance(np.array(self.bucket_lengths))
            most = [round(max(most[-1], 1) * float(each[-1] / one)) for one in each]
        return tuple(max(1, rows) for rows in most)

    @functools.cached_property
    def _labels(self) -> NDArray[np.int64]:
        """int64[R]: of each row."""
        rows = self.rows_of_split
        labels: NDArray[np.int64] = self.corpus.lengths.labels[self.documents[rows.order]]
        return np.add.reduceat(labels, rows.start[:-1])

    @functools.cached_property
    def _dealing(self) -> Dealing:
        costs, rows, even = self._costs(np.array(self.bucket_lengths)) * self._taken, self.rows_of_split, None
        if self.balance is not None:
            each = self.balance(self._sizes[self.documents[rows.order]])
            even = np.add.reduceat(each, rows.start[:-1])
        return Dealing(
            self._rows_in,
            self._taken,
            self.microbatches,
            self.split,
            self.seed,
            self.order,
            costs.tolist(),
            even,
        )

    @property
    def _costs(self) -> Costs:
        return self.balance or Costs()

    @property
    def _dtypes(self) -> Mapping[str, str]:
        return DTYPES | PACKED_DTYPES if self.packed else DTYPES

    def _fields(self, bucket: int) -> Fields:
        rows, (patches, tokens) = self._taken[bucket], self.bucket_lengths[bucket]
        inner: dict[str, tuple[int, ...]] = {
            "patches": (patches, self.corpus.patches.values),
            "patch_places": (patches, 2),
            "images": (patches,),
        }
        return {
            name: jax.ShapeDtypeStruct((rows, *inner.get(name, (tokens,))), dtype)
            for name, dtype in self._dtypes.items()
        }
