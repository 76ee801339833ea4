"""Where documents come from: text files, JSON lines, token arrays, and any sequence of examples.

A source names its documents and reads one at a time. If it knows their sizes without reading them (`sizes`),
it can also read a part of one.
"""

from __future__ import annotations

import functools
import json
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.files import find_files, size_of
from rrfp_jax.data.optional import imported
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, expanded
from rrfp_jax.files import opened_binary

Raw: TypeAlias = "bytes | str | NDArray[Any]"
"""A document as it is read: text, text in UTF-8, or tokens."""

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class BadDocument(ValueError):
    """A document that cannot be used; the first argument says why, in a word or two, and a second one names
    the part of it that is at fault."""

    def __str__(self) -> str:
        return " ".join(str(argument) for argument in self.args if argument)


class Source(Protocol):
    """Documents in a fixed order, the same on every process."""

    @property
    def names(self) -> Sequence[str]:
        """A name for every document, the same on every machine."""
        ...

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """int64[N]: bytes or tokens of every document, -1 if unreadable; None if reading must tell."""
        ...

    def read(self, document: int, begin: int = 0, end: int | None = None) -> Raw:
        """A document, or a part of it where sizes are known; `BadDocument` if there is none to be had."""
        ...


@dataclass(frozen=True)
class TextFiles:
    """Text files as documents.

    Args:
        path: a file, a folder, a glob, or "" for Python's standard library; see `find_files`.
        document: "file", or "section": what blank lines separate. They belong to the section before.

    Raises:
        UsageError: no such unit, when made; no such files, when first used.
    """

    path: str = ""
    document: Literal["file", "section"] = "file"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.document not in ("file", "section"):
            raise UsageError(f"document={self.document!r}: no such unit; give 'file' or 'section'")

    @property
    def names(self) -> Sequence[str]:
        """Paths from the root, with the first byte behind a colon if documents are sections."""
        return [span[0] for span in self._spans]

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """In bytes."""
        return np.array([size for *_, size in self._spans], np.int64)

    def read(self, document: int, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes; a file that has shrunk since is bad."""
        _, path, first, size = self._spans[document]
        wanted = (size if end is None else end) - begin
        with _readable(path) as file:
            file.seek(first + begin)
            data = file.read(wanted)
        if len(data) < wanted:
            raise BadDocument(f"shorter than the {first + size} bytes that it had at the start")
        return data

    @property
    def files(self) -> Iterable[Path]:
        """The files that are read."""
        return (path for _, path, *_ in self._spans)

    @functools.cached_property
    def _spans(self) -> list[tuple[str, Path, int, int]]:
        files = [(name, path, size_of(path)) for name, path in find_files(self.path)]
        if self.document == "file":
            return [(name, path, 0, size) for name, path, size in files]
        return [
            (f"{name}:{begin}", path, begin, size)
            for name, path, total in files
            for begin, size in _sections(path, total)
        ]


@contextmanager
def _readable(path: Path) -> Iterator[IO[bytes]]:
    """A file of documents that is read once more; `BadDocument` if it cannot be."""
    try:
        with opened_binary(path) as file:
            yield file
    except OSError as error:
        raise BadDocument(f"unreadable ({error.strerror})") from error


@contextmanager
def _refused_if_unreadable(path: Path) -> Iterator[None]:
    """Inside, a file is looked through for documents.

    Raises:
        UsageError: it cannot be read, or shrinks meanwhile.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read ({reason}): leave the data alone and start again") from None


def _sections(path: Path, total: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each section of a file of `total` bytes; one of `total`, if that is below 1."""
    ends = [total]
    if total > 0:
        with (
            _refused_if_unreadable(path),
            opened_binary(path) as file,
            mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ) as data,
        ):
            ends = [match.end() for match in _BLANK_LINES.finditer(data)]  # type: ignore[arg-type]
        ends += [total] if not ends or ends[-1] < total else []
    return ((begin, end - begin) for begin, end in zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class JsonLines:
    """Files of one JSON object per line, each a document: its `field`, a string or a list of tokens.

    Lines are found by one pass at first use. Empty lines are passed over.
    """

    path: str
    field: str = "text"

    sizes = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def names(self) -> Sequence[str]:
        """`file:line`, counted from 1."""
        return [f"{name}:{line}" for name, _, line, _ in self._lines]

    def read(self, document: int, begin: int = 0, end: int | None = None) -> Raw:
        """The line's field."""
        return _raw(self.parsed(document), self.field)

    def parsed(self, document: int) -> Any:
        """What the line is as JSON; `BadDocument` if it is none."""
        _, path, _, offset = self._lines[document]
        with _readable(path) as file:
            file.seek(offset)
            line = file.readline()
        try:
            return json.loads(line)
        except UnicodeDecodeError as error:
            raise BadDocument("undecodable") from error
        except (ValueError, RecursionError) as error:
            raise BadDocument("not JSON") from error

    def file(self, document: int) -> Path:
        """That the line is in."""
        return self._lines[document][1]

    @property
    def files(self) -> Iterable[Path]:
        """The files that are read."""
        return (path for _, path, *_ in self._lines)

    @functools.cached_property
    def _lines(self) -> list[tuple[str, Path, int, int]]:
        found = []
        for name, path in find_files(self.path, (".jsonl", ".ndjson", ".json")):
            offset = 0
            with _refused_if_unreadable(path), opened_binary(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        found.append((name, path, number, offset))
                    offset += len(line)
        return found


@dataclass(frozen=True)
class Examples:
    """Any sequence of examples as documents: a list, a `datasets.Dataset`, a grain `MapDataset`.

    Args:
        examples: with `len` and indices; read by index only.
        field: of an example that is a dict; "" if examples are strings, bytes or token arrays themselves.
        name: what names of documents begin with.

    Raises:
        UsageError: `examples` has no length or no end, such as a repeated MapDataset.
    """

    examples: Any
    field: str = "text"
    name: str = "example"

    sizes = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not hasattr(self.examples, "__len__") or not hasattr(self.examples, "__getitem__"):
            kind = type(self.examples).__name__
            raise UsageError(f"examples of type {kind}: give something with a length and indices")
        if (count := len(self.examples)) > 2**40:
            raise UsageError(
                f"{count} examples: a sequence without end; leave out repeat(), epochs go on anyway"
            )

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """`name:index`."""
        return [f"{self.name}:{i}" for i in range(len(self.examples))]

    def read(self, document: int, begin: int = 0, end: int | None = None) -> Raw:
        """The example's field."""
        return _raw(self.examples[document], self.field)


def hugging_face(path: str, field: str = "text", split: str = "train") -> Examples:
    """A Hugging Face dataset as `save_to_disk` has left it: memory-mapped, read example by example.

    Raises:
        UsageError: `datasets` is not installed; no dataset there, or it lacks the split or the field.
    """
    datasets = imported("datasets", f"the dataset {path}")
    folder = expanded("path", path)
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # the package raises no narrower one
        raise UsageError(f"{path}: no dataset written by save_to_disk ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UsageError(f"{path}: no split {split!r}; there are {', '.join(found)}")
        found = found[split]
    if field not in found.column_names:
        raise UsageError(f"{path}: no field {field!r}; there are {', '.join(found.column_names)}")
    return Examples(found, field, f"{folder.name}/{split}")


def _raw(example: Any, field: str) -> Raw:
    if field:
        if not isinstance(example, dict) or field not in example:
            raise BadDocument(f"without the field {field!r}")
        example = example[field]
    if isinstance(example, (bytes, str)):
        return example
    try:
        array = np.asarray(example) if isinstance(example, (list, tuple, np.ndarray)) else None
    except (ValueError, OverflowError) as error:  # ragged
        raise BadDocument("neither text nor tokens") from error
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadDocument("neither text nor tokens")
    return array
