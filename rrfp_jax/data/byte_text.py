"""Text as bytes, from files or the running Python's standard library, cut into windows for a language model.

The files of a split, sorted by name, are joined into N bytes. Window k holds the `sequence_length` tokens
from byte `k * sequence_length` on and, as labels, their next bytes: all but the first byte are a label once.
Planning looks only at names and sizes; the bytes are read by those processes that load them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.contract import MOST_TOKENS, Arrays, Microbatch
from rrfp_jax.data.documents import TEXT_FIELDS
from rrfp_jax.data.images import CHANGED, BadDocument
from rrfp_jax.data.sampling import Split, check_counts, check_sampling, planned, shuffled
from rrfp_jax.data.sources import TEXT_SUFFIXES, FileSpans, Span, find_files, size_of
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, says_its_arguments


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class ByteText(FileSpans):
    """Windows of bytes out of text files: a `Data` for language models with a vocabulary of 256.

    Fields: `tokens` int32[batch, T], `labels` int32[batch, T] and `mask` float32[batch, T], where T is
    `sequence_length`. The mask is 1 where there is a label, and 0 beyond the end of the data, where tokens
    and labels are 0. A microbatch's weight is its number of labels; its source is the fingerprint of the
    data, then the first byte of each window.

    `path` is a file, a folder (searched to any depth for files with one of `TEXT_SUFFIXES`; names that begin
    with a dot are passed over), a glob (`**` for any depth; takes every file that matches), or "" for the
    *.py files of the running Python's standard library without its tests, about 12 MB.

    `validation_share` of the files, those whose names relative to the folder hash lowest, are for validation
    and the others for training. Of a single file it is the last bytes.

    Training draws every window once per epoch, in an order set by (seed, epoch), epoch after epoch without a
    gap. Validation takes the windows as they come, all of them in `steps` steps.

    Raises `UsageError` at once for an impossible setting; when first planned, for files that are missing,
    empty, or too short for one window in this split.
    """

    path: str = ""
    sequence_length: int
    batch: int  # windows per microbatch
    microbatches: int  # per step
    split: Split = "train"
    validation_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = {name: getattr(self, name) for name in ("sequence_length", "batch", "microbatches")}
        check_counts("no token", **sizes)
        if (tokens := math.prod(sizes.values())) > MOST_TOKENS:
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise UsageError(f"{given}: {tokens} tokens a step; give at most {MOST_TOKENS}")
        check_sampling(self.split, self.validation_share)

    @functools.cached_property
    def steps(self) -> int:
        """Steps that hold every window once: a pass of validation; an epoch of training, rounded up."""
        return -(-self._windows // (self.microbatches * self.batch))

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with the names and the sizes of the split's files; contents are not read."""
        names = "".join(f"{name}\0{first}\0{first + size}\0" for name, _, first, size in self._spans)
        return int.from_bytes(hashlib.blake2b(os.fsencode(names), digest_size=7).digest())

    @functools.cached_property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the split, uint8[N], read at first use; `UsageError` if a file has shrunk since."""
        data = np.empty(sum(span.size for span in self._spans), np.uint8)
        filled = 0
        for number, span in enumerate(self._spans):
            try:
                data[filled : filled + span.size] = np.frombuffer(self._bytes(number), np.uint8)
            except BadDocument as error:
                raise UsageError(f"{span.path}: {error}; {CHANGED}") from error
            filled += span.size
        data.flags.writeable = False
        return data

    def plan(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` >= 0, a function of (seed, step, split) and the files.

        There are always `microbatches` of them: the last validation step is filled up with windows beyond the
        end, whose mask is 0. After `steps` validation begins again.
        """
        count = self.microbatches * self.batch
        if self.split == "train":
            drawn = np.arange(step * count, (step + 1) * count, dtype=np.uint64)
            window = shuffled(drawn, self._windows, self.seed)
        else:
            first = step % self.steps * count
            window = np.arange(first, first + count)
        starts = window.reshape(self.microbatches, self.batch) * self.sequence_length
        weights = np.clip(self._size - 1 - starts, 0, self.sequence_length).sum(axis=1)
        shape = (self.batch, self.sequence_length)
        fields = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in TEXT_FIELDS.items()}
        return [
            Microbatch(fields, source=(self.fingerprint, *row), weight=float(weight))
            for row, weight in zip(starts.tolist(), weights, strict=True)
        ]

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; `UsageError` for an unknown field and for a plan made from other files."""
        starts = planned(microbatch, self.fingerprint, fields, TEXT_FIELDS, "files")
        position = np.array(starts)[:, None] + np.arange(self.sequence_length)
        real = position < self._size - 1  # the last byte has no next one
        position *= real

        def array(name: str) -> NDArray[Any]:
            return real if name == "mask" else real * self.data[position + (name == "labels")]

        return {name: array(name).astype(TEXT_FIELDS[name]) for name in fields}

    @functools.cached_property
    def _spans(self) -> list[Span]:
        """The parts of files that this split joins, in order; at least one window long together."""
        every = [Span(name, file, 0, size_of(file)) for name, file in find_files(self.path)]
        if unreadable := [file.path for file in every if file.size < 0]:
            raise UsageError(f"{unreadable[0]}: cannot be read; make it readable, or leave it out of path")
        files = [file for file in every if file.size]
        if not files:
            raise UsageError(
                f"path={self.path!r}: {len(every)} text files there, with no byte in them; give files with "
                f"text (in a folder, ending in {' '.join(TEXT_SUFFIXES)})"
            )
        if len(files) == 1:
            (file,) = files
            held = round(self.validation_share * file.size)
            cut = file.size - held
            parts = [file._replace(first=cut, size=held)], [file._replace(size=cut)]
        else:
            files.sort(key=lambda file: hashlib.blake2b(os.fsencode(file.name)).digest())
            held = max(1, min(len(files) - 1, round(self.validation_share * len(files))))
            parts = files[:held], files[held:]
        pieces = sorted(parts[self.split == "train"])
        if (size := sum(piece.size for piece in pieces)) <= self.sequence_length:
            raise UsageError(
                f"path={self.path!r}: the {self.split} split has {size} bytes ({len(files)} files in all), "
                f"less than a window of sequence_length={self.sequence_length} and its next byte; "
                f"give more text, less sequence_length or validation_share other than {self.validation_share}"
            )
        return pieces

    @functools.cached_property
    def _size(self) -> int:
        return sum(piece.size for piece in self._spans)

    @property
    def _windows(self) -> int:
        return -(-(self._size - 1) // self.sequence_length)


def bigram_loss(train: ByteText, validation: ByteText, steps: int = 0) -> float:
    """The loss on `validation`, in nats per byte, of the add-one smoothed counts of byte pairs in `train`.

    It is that of the bytes of the first `steps` steps of validation; 0 for all. A model that beats it has
    learnt more than which byte follows which.
    """
    seen = _count_pairs(train.data) + 1
    labels = steps * validation.microbatches * validation.batch * validation.sequence_length
    pairs = _count_pairs(validation.data[: labels + 1] if steps else validation.data)
    log_probability = np.log(seen) - np.log(seen.sum(axis=1, keepdims=True))
    return float(-(pairs * log_probability).sum() / pairs.sum())


def _count_pairs(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """int64[256, 256]: how often each byte (row) is followed by each (column)."""
    counts = np.zeros(256 * 256, np.int64)
    for begin in range(0, len(data) - 1, 1 << 20):  # bincount widens its input to 8 bytes per pair
        part = data[begin : begin + (1 << 20) + 1].astype(np.uint16)
        counts += np.bincount(part[:-1] << 8 | part[1:], minlength=256 * 256)
    return counts.reshape(256, 256)
