"""Documents of natural length as data for a Trainer: cut to bucket lengths, padded or packed, and masked."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data import rows as cut
from rrfp_jax.data.balance import Cost, Order, Polynomial, rows_by_cost, rows_by_tokens
from rrfp_jax.data.buckets import Fit, bucket_of, check_lengths
from rrfp_jax.data.contract import MOST_TOKENS, Arrays, Microbatch
from rrfp_jax.data.corpus import Corpus
from rrfp_jax.data.dealing import Dealing, Split, check_dealing, documents_of, planned
from rrfp_jax.data.draw import EMPTY
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields

_DTYPES = {"tokens": "int32", "labels": "int32", "mask": "float32"}
_PACKED_DTYPES = {"segments": "int32", "positions": "int32"}


@dataclass(frozen=True, kw_only=True)
class Documents:
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
            `draw.py`); "validation" for those held out, in order, all of them in `steps` steps.
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
    tokens: int | None = None
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
        for name in ("tokens", "rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name}={value}: a step would hold no token; give {name} >= 1")
        if (self.tokens is None) == (self.rows is None):
            raise UsageError(f"tokens={self.tokens}, rows={self.rows}: give one, the size of a microbatch")
        longest = self.lengths.longest if isinstance(self.lengths, Fit) else max(check_lengths(self.lengths))
        each = max(self.tokens or (self.rows or 1) * longest, longest)
        if (tokens := self.microbatches * each) > MOST_TOKENS:
            raise UsageError(f"{tokens} tokens a step, padding included: give at most {MOST_TOKENS}")
        check_dealing(self.microbatches, self.split, self.validation_share, self.order)

    @property
    def steps(self) -> int:
        """Steps that hold every row once: a pass of validation; an epoch of training, rounded up."""
        return self._dealing.steps

    @property
    def buckets(self) -> Sequence[Mapping[str, jax.ShapeDtypeStruct]]:
        """The fields of every shape that a microbatch can have."""
        return [self._fields(bucket) for bucket, rows in enumerate(self._rows_in) if len(rows)]

    @functools.cached_property
    def bucket_lengths(self) -> tuple[int, ...]:
        """Ascending; given or fitted."""
        if not isinstance(self.lengths, Fit):
            return check_lengths(self.lengths)
        every = cut.split(np.maximum(self.corpus.lengths - 1, 0), self.lengths.longest).size
        return self.lengths.lengths(cut.packed(every, self.lengths.longest).size if self.packed else every)

    @property
    def padding(self) -> float:
        """The share of positions without a label, over all rows of the split."""
        positions = np.array(self.bucket_lengths)[self._bucket_of_row].sum()
        return 1 - float(self.rows_of_split.size.sum() / positions)

    def plan(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` >= 0, a function of (seed, step, split) and the documents."""
        return self._dealing.plan(step, self.fingerprint, self._fields, self.rows_of_split.size)

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; `UsageError` for an unknown field or a plan of other documents."""
        bucket, rows = planned(microbatch, self.fingerprint, fields, self._dtypes)
        shape = (len(rows), self.bucket_lengths[bucket])
        arrays = {name: np.zeros(shape, self._dtypes[name]) for name in fields}
        for r, row in enumerate(rows):
            if row != EMPTY:
                self._fill({name: array[r] for name, array in arrays.items()}, row)
        return arrays

    def _fill(self, arrays: Mapping[str, NDArray[Any]], row: int) -> None:
        """Put the pieces of a row into its arrays, [length] each; text is read only for tokens and labels."""
        pieces, at = self.pieces, 0
        for segment, piece in enumerate(self.rows_of_split.pieces(row).tolist(), 1):
            begin, size = int(pieces.begin[piece]), int(pieces.size[piece])
            own = slice(at, at + size)
            if "tokens" in arrays or "labels" in arrays:
                tokens = self.corpus.tokens(int(pieces.document[piece]), begin, begin + size + 1)
            for name, array in arrays.items():
                match name:
                    case "tokens":
                        array[own] = tokens[:-1]
                    case "labels":
                        array[own] = tokens[1:]
                    case "mask":
                        array[own] = 1
                    case "segments":
                        array[own] = segment
                    case "positions":
                        array[own] = np.arange(size)
            at += size

    # What there is, found once.

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with the rows made of them."""
        rows, pieces = self.rows_of_split, self.pieces
        digest = hashlib.blake2b(f"{self.corpus.fingerprint} {self.bucket_lengths}".encode(), digest_size=7)
        for array in (pieces.document, pieces.begin, rows.start, rows.order):
            digest.update(array.tobytes())
        return int.from_bytes(digest.digest())

    @functools.cached_property
    def pieces(self) -> cut.Pieces:
        """Of the split's documents."""
        predictions = np.maximum(self.corpus.lengths - 1, 0)
        usable = np.flatnonzero(predictions)
        kept = documents_of(self.split, usable, self.validation_share, self.corpus.source)
        own = np.zeros_like(predictions)
        own[kept] = predictions[kept]
        return cut.split(own, self.bucket_lengths[-1])

    @functools.cached_property
    def rows_of_split(self) -> cut.Rows:
        """All rows of the split."""
        sizes = self.pieces.size
        return cut.packed(sizes, self.bucket_lengths[-1]) if self.packed else cut.one_each(sizes)

    @functools.cached_property
    def _bucket_of_row(self) -> NDArray[np.int64]:
        bucket_of(int(self.rows_of_split.size.max()), self.bucket_lengths)
        return np.searchsorted(self.bucket_lengths, self.rows_of_split.size)

    @functools.cached_property
    def _rows_in(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self._bucket_of_row == bucket) for bucket in range(len(self.bucket_lengths))]

    @functools.cached_property
    def _taken(self) -> tuple[int, ...]:
        lengths = self.bucket_lengths
        if self.balance is not None:
            longest = self.rows or rows_by_tokens(lengths, self.tokens or 1)[-1]
            return rows_by_cost(lengths, longest, self.balance)
        return (self.rows,) * len(lengths) if self.rows else rows_by_tokens(lengths, self.tokens or 1)

    @functools.cached_property
    def _dealing(self) -> Dealing:
        costs = (self.balance or Polynomial())(np.array(self.bucket_lengths)) * self._taken
        return Dealing(
            self._rows_in,
            self._taken,
            self.microbatches,
            self.split,
            self.seed,
            self.order,
            costs.tolist(),
            None if self.balance is None else self._row_costs(self.balance),
        )

    def _row_costs(self, balance: Cost) -> NDArray[np.float64]:
        """What the documents of each row cost; padding costs nothing here."""
        rows = self.rows_of_split
        return np.add.reduceat(balance(self.pieces.size[rows.order]), rows.start[:-1])

    @property
    def _dtypes(self) -> Mapping[str, str]:
        return _DTYPES | _PACKED_DTYPES if self.packed else _DTYPES

    def _fields(self, bucket: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        shape = (self._taken[bucket], self.bucket_lengths[bucket])
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in self._dtypes.items()}
