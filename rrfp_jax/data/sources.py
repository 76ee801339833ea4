"""Where documents come from: text files, JSON lines, folders of images, token arrays, any examples.

A source names its documents and reads one at a time; images among their text are opened later.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import DTypeLike, NDArray

from rrfp_jax.data.images import IMAGE_SUFFIXES, BadDocument, Image
from rrfp_jax.errors import UsageError, imported
from rrfp_jax.fields import check_fields, expanded
from rrfp_jax.files import opened_binary, read_whole

Parts: TypeAlias = Sequence[Image | str]
"""A document from its beginning to its end: strings are text, anything else is an image."""

Raw: TypeAlias = Any
"""A document as it is read: text in UTF-8, text, an array of tokens, or `Parts`."""

MARKER = "<image>"
"""Where an image stands in a text, unless said otherwise."""

LONGEST_TEXT = 2**24
"""Bytes of the file that describes an image."""

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class Source(Protocol):
    """Documents in a fixed order, the same on every process.

    One that knows the sizes of its documents without reading them may have `sizes`, int64[N] of bytes or
    tokens, -1 of what is unreadable. Then it is asked for parts, `read(document, begin, end)`.
    """

    @property
    def names(self) -> Sequence[str]:
        """A name for every document, the same on every machine."""

    def read(self, document: int) -> Raw:
        """A document; `BadDocument` if there is none to be had."""


class Span(NamedTuple):
    """A document's bytes in a file."""

    name: str
    path: Path
    first: int
    size: int  # -1 if the file is unreadable


class FileSpans:
    """Documents that are parts of files, found at first use."""

    @functools.cached_property
    def _spans(self) -> list[Span]:
        raise NotImplementedError

    @property
    def names(self) -> Sequence[str]:
        """Paths from the root; behind a colon the part, if there are several."""
        return [span.name for span in self._spans]

    @property
    def files(self) -> Iterable[Path]:
        """The files that are read."""
        return (span.path for span in self._spans)

    def _bytes(self, document: int, begin: int = 0, end: int | None = None) -> bytes:
        span = self._spans[document]
        wanted = (span.size if end is None else end) - begin
        try:
            with opened_binary(span.path) as file:
                file.seek(span.first + begin)
                data = file.read(wanted)
        except OSError as error:
            raise BadDocument(f"unreadable ({error.strerror})") from error
        if len(data) < wanted:
            raise BadDocument(f"shorter than the {span.first + span.size} bytes that it had at the start")
        return data


@dataclass(frozen=True)
class TextFiles(FileSpans):
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

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """In bytes."""
        return np.array([span.size for span in self._spans], np.int64)

    def read(self, document: int, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes; a file that has shrunk since is bad."""
        return self._bytes(document, begin, end)

    @functools.cached_property
    def _spans(self) -> list[Span]:
        files = [Span(name, path, 0, size_of(path)) for name, path in find_files(self.path)]
        return files if self.document == "file" else [span for file in files for span in _sections(file)]


@contextmanager
def _looked_through(path: Path) -> Iterator[BufferedReader]:
    """A file in which documents are looked for; `UsageError` if it cannot be read, or shrinks meanwhile."""
    try:
        with opened_binary(path) as file:
            yield file
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read ({reason}): leave the data alone and start again") from None


def _sections(file: Span) -> Iterator[Span]:
    """The sections of a file; one without any byte of a file that has none."""
    ends = [file.size]
    if file.size > 0:
        with _looked_through(file.path) as text, mmap(text.fileno(), file.size, access=ACCESS_READ) as data:
            ends = [match.end() for match in _BLANK_LINES.finditer(data)]  # type: ignore[arg-type]
        ends += [file.size] if not ends or ends[-1] < file.size else []
    for begin, end in zip([0, *ends], ends, strict=False):
        yield Span(f"{file.name}:{begin}", file.path, begin, end - begin)


@dataclass(frozen=True)
class JsonLines(FileSpans):
    """Files of one JSON object per line, each a document: its `field`, a string or a list of tokens.

    With `images`, also those: `{"text": "<image> and that", "images": [path]}` for `images="images"`. They
    take the markers' places; a text without markers comes behind all of them. Paths must not lead out of
    their folder, by `..`, a symbolic link or a root: whoever wrote the lines may not be who reads them.

    Lines are found by one pass at first use, named `file:line` from 1 on. Empty lines are passed over.

    Args:
        path: of the lines; see `find_files`.
        field: of the text.
        images: field of the paths of images, a list, or one; "" for text alone.
        folder: that paths of images begin at; "" for the one that each file of lines is in.
        marker: where an image stands in a text.
    """

    path: str
    field: str = "text"
    images: str = ""
    folder: str = ""
    marker: str = MARKER

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.marker:
            raise UsageError("marker='': give the text that an image stands for")

    def read(self, document: int) -> Raw:
        """The line's field; with `images` its text, with its images where they stand."""
        span, line = self._spans[document], self._bytes(document)
        try:
            parsed = json.loads(line)
        except UnicodeDecodeError as error:
            raise BadDocument("undecodable") from error
        except (ValueError, RecursionError) as error:
            raise BadDocument("not JSON") from error
        if not self.images:
            return _raw(parsed, self.field)
        text, images = _text_and_images(parsed, self.field, self.images)
        root = expanded("folder", self.folder) if self.folder else span.path.parent
        return parts_of(text, [_within(root, image) for image in images], self.marker)

    @functools.cached_property
    def _spans(self) -> list[Span]:
        found = []
        for name, path in find_files(self.path, (".jsonl", ".ndjson", ".json")):
            offset = 0
            with _looked_through(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        found.append(Span(f"{name}:{number}", path, offset, len(line)))
                    offset += len(line)
        return found


@dataclass(frozen=True)
class ImageFolder:
    """Images of a folder, each with the text that describes it in a file next to it: `cat.png` and `cat.txt`.

    A text without an image is a bad document, and so is an image without text.

    Args:
        path: a folder, searched to any depth; or an image or a glob; see `find_files`.
        suffix: of texts.
    """

    path: str
    suffix: str = ".txt"

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.suffix.startswith(".") or self.suffix.lower() in IMAGE_SUFFIXES:
            raise UsageError(f"suffix={self.suffix!r}: of the texts; give one such as '.txt'")

    @property
    def names(self) -> Sequence[str]:
        """Paths from the root: of images, and of texts that describe none."""
        return [name for name, _ in self._files]

    def read(self, document: int) -> Parts:
        """The image, and behind it its text."""
        _, path = self._files[document]
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            raise BadDocument("without an image")
        texts = [path.with_suffix(own) for own in (self.suffix, self.suffix.lower(), self.suffix.upper())]
        try:
            text = decoded(read_whole(next(filter(os.path.exists, texts), texts[0]), LONGEST_TEXT))
        except FileNotFoundError:
            raise BadDocument("without text") from None
        except OSError as error:
            raise BadDocument("with an unreadable text") from error
        return parts_of(text, [path])

    @functools.cached_property
    def _files(self) -> list[tuple[str, Path]]:
        files = find_files(self.path, (*IMAGE_SUFFIXES, self.suffix.lower()))
        images = [(name, path) for name, path in files if path.suffix.lower() in IMAGE_SUFFIXES]
        described = {path.with_suffix("") for _, path in images}
        alone = [(name, path) for name, path in files if path.with_suffix("") not in described]
        return sorted(images + alone)


@dataclass(frozen=True)
class TokenFile:
    """Tokens of all documents, one after the other, in an integer array on disk.

    Args:
        path: a one-dimensional `.npy`, or raw numbers (`.bin`).
        dtype: of raw numbers; a `.npy` tells its own.
        offsets: where documents begin, ascending from 0, int64 in a `.npy` (or raw, `.bin`); the number of
            tokens may stand at the end. "" for the path with `.offsets.npy` in place of its suffix.

    Raises:
        UsageError: when first used: a file is missing or is something else, or offsets do not fit.
    """

    path: str
    dtype: DTypeLike = "uint16"
    offsets: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """`file:index`."""
        name = self.files[0].name
        return [f"{name}:{i}" for i in range(len(self.sizes))]

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """In tokens."""
        return np.diff(self._offsets)

    def read(self, document: int, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """A copy of the document's tokens."""
        first, last = self._offsets[document : document + 2]
        tokens = self._tokens
        if tokens.base.size() < tokens.offset + tokens.nbytes:  # else the kernel would end the process
            raise BadDocument(f"{self.path} is shorter than it was at the start")
        return np.array(tokens[first + begin : last if end is None else first + end])

    @property
    def files(self) -> tuple[Path, Path]:
        """The files that are read: of tokens, and of offsets."""
        path = expanded("path", self.path)
        return path, expanded("offsets", self.offsets) if self.offsets else offsets_path(path)

    @functools.cached_property
    def _tokens(self) -> Any:
        return _mapped(self.files[0], self.dtype, "tokens")

    @functools.cached_property
    def _offsets(self) -> NDArray[np.int64]:
        path = self.files[1]
        offsets = np.asarray(_mapped(path, np.int64, "offsets of documents"), np.int64)
        total = len(self._tokens)
        if not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > total:
            raise UsageError(
                f"{path}: offsets of documents must ascend from 0 to at most the {total} tokens of "
                f"{self.path}"
            )
        return offsets if offsets[-1] == total and offsets.size > 1 else np.append(offsets, total)


@dataclass(frozen=True)
class Examples:
    """Any sequence of examples as documents: a list, a `datasets.Dataset`, a grain `MapDataset`.

    With `images`, an image may be a `pathlib.Path`, the bytes of a file, an array uint8[H, W] or
    uint8[H, W, 3 or 4], a Pillow image, or what datasets makes of one, `{"bytes": ...}`. A plain string is
    none: paths in other people's data are for `JsonLines`.

    Args:
        examples: with `len` and indices; read by index only.
        field: of an example that is a dict; "" if examples are strings, bytes or token arrays themselves.
        name: what names of documents begin with.
        images: field of the images, a list, or one; "" for text alone.
        marker: where an image stands in a text; see `JsonLines`.

    Raises:
        UsageError: `examples` is a dict of columns, or has no length or no end, as a repeated MapDataset.
    """

    examples: Any = dataclasses.field(repr=False)  # which may be long
    field: str = "text"
    name: str = "example"
    images: str = ""
    marker: str = MARKER

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.marker:
            raise UsageError("marker='': give the text that an image stands for")
        kind = type(self.examples).__name__
        if isinstance(self.examples, Mapping):  # of columns, or of splits
            rows = "datasets.Dataset.from_dict(columns), a list of dicts, or one split"
            raise UsageError(f"examples of type {kind}: give what has rows by index, such as {rows}")
        if not hasattr(self.examples, "__len__") or not hasattr(self.examples, "__getitem__"):
            raise UsageError(f"examples of type {kind}: give something with a length and indices")
        if (count := len(self.examples)) > 2**40:
            raise UsageError(f"{count} examples, without end; leave out repeat(), epochs go on anyway")

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """`name:index`."""
        return [f"{self.name}:{i}" for i in range(len(self.examples))]

    def read(self, document: int) -> Raw:
        """The example's field; with `images` its text, with its images where they stand."""
        if not self.images:
            return _raw(self.examples[document], self.field)
        try:
            example = self.examples[document]
        except Exception as error:  # one that decodes its images itself raises what it likes
            raise BadDocument("with an example that cannot be read") from error
        text, images = _text_and_images(example, self.field, self.images)
        plain = [image.get("bytes") if isinstance(image, Mapping) else image for image in images]
        if any(isinstance(image, str) for image in plain):
            raise BadDocument("with a string for an image")
        return parts_of(text, plain, self.marker)


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
        if not isinstance(example, Mapping) or field not in example:
            remedy = " (field='' takes them as they are)" if isinstance(example, (bytes, str, list)) else ""
            raise BadDocument(f"without the field {field!r}{remedy}")
        example = example[field]
    if isinstance(example, (bytes, str)):
        return example
    if isinstance(example, (list, tuple)) or hasattr(example, "__array__"):
        with suppress(TypeError, ValueError, OverflowError):  # ragged
            array = np.asarray(example)
            if array.ndim == 1 and (not array.size or array.dtype.kind in "iu"):
                return array
    raise BadDocument("neither text nor tokens")


def decoded(raw: bytes) -> str:
    """Text in UTF-8; `BadDocument` if it is not."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("undecodable") from error


def parts_of(text: str, images: Sequence[Image], marker: str = MARKER) -> Parts:
    """A text in which each marker is an image; without markers all images come before it."""
    texts = text.split(marker)
    if len(texts) == 1:
        return [*images, text]
    if len(texts) - 1 != len(images):
        raise BadDocument("with more or fewer images than places for them")
    return [texts[0], *itertools.chain(*zip(images, texts[1:], strict=True))]


def _text_and_images(given: Any, text: str, images: str) -> tuple[str, Sequence[Any]]:
    """The text and the images of an example; what it does not have is empty."""
    if not isinstance(given, Mapping):
        raise BadDocument("no object with fields")
    found = given.get(text)
    if found is not None and not isinstance(found, str):
        raise BadDocument(f"with a field {text!r} that is no text")
    if (many := given.get(images)) is None:
        many = ()
    several = isinstance(many, (list, tuple)) or getattr(many, "ndim", 0) == 4  # stacked in an array
    return found or "", many if several else (many,)


def _within(root: Path, given: Any) -> Path:
    """The path of an image in a folder; `BadDocument` if it leads out of the folder, or is no path."""
    if not isinstance(given, str) or not given or "\0" in given:
        raise BadDocument("with a path that is none")
    path = root / given
    try:
        inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links
        raise BadDocument("with an unreadable image", given) from error
    if not inside or Path(given).is_absolute() or ".." in Path(given).parts:
        raise BadDocument("with a path out of the folder", given)
    return path


def offsets_path(tokens: Path) -> Path:
    """Where the offsets of a token file are, unless said otherwise."""
    return tokens.with_suffix(".offsets.npy")


def _mapped(path: Path, dtype: DTypeLike, what: str) -> NDArray[Any]:
    try:
        with opened_binary(path):  # nothing but a file can be mapped, and a pipe must not be waited for
            is_npy = path.suffix == ".npy"
            array: NDArray[Any] = open_memmap(path, mode="r") if is_npy else np.memmap(path, dtype, mode="r")
    except Exception as error:  # NumPy's reading of headers raises many kinds
        reason = getattr(error, "strerror", None) or (error.args or [error])[0]
        raise UsageError(f"{path}: no array of {what} ({reason})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wrong = f"{array.dtype}{list(array.shape)}"
        raise UsageError(f"{path}: {wrong} cannot be {what}: one axis of integers can")
    return array


# Files under a path, by names that are the same on every machine.

TEXT_SUFFIXES = (
    *(".md", ".rst", ".tex", ".txt"),
    *(".c", ".cc", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".js", ".py", ".pyi", ".rs", ".sh", ".ts"),
    *(".cfg", ".css", ".csv", ".html", ".ini", ".json", ".jsonl", ".toml", ".xml", ".yaml", ".yml"),
)
# Installed packages are not the standard library, and its tests are longer than all the rest (20 of 32 MB).
NOT_STANDARD_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")


def find_files(path: str, suffixes: Collection[str] = TEXT_SUFFIXES) -> list[tuple[str, Path]]:
    """(name from the root, file) of all files that `path` stands for, sorted by name.

    Args:
        path: a file, a folder (searched to any depth for files with one of `suffixes`; names that begin with
            a dot, and links to folders, are passed over), a glob (`**` for any depth, through links, too;
            takes every file that matches), or "" for the *.py files of the running Python's standard library
            without its tests.
        suffixes: in lower case, with their dot.

    Raises:
        UsageError: there is none, or a folder in it cannot be read.
    """
    files: Iterable[Path]
    root = expanded("path", path) if path else Path(sysconfig.get_path("stdlib"))
    if not path:
        files = _walk(root, (".py",), NOT_STANDARD_LIBRARY)
    elif root.is_dir():
        files = _walk(root, suffixes)
    else:
        files = [root] if root.is_file() else [Path(name) for name in glob.glob(str(root), recursive=True)]
        if not files:
            raise UsageError(
                f"path={path!r}: no such file or folder, and no match as a glob, from {Path.cwd()}; "
                "give a path that exists on this machine, or '' for Python's standard library"
            )
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), root.parent.parts))
    return sorted((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def size_of(file: Path) -> int:
    """Bytes of a file; -1 if it cannot be read."""
    try:
        with opened_binary(file) as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError:
        return -1


def _walk(root: Path, suffixes: Collection[str], without: Collection[str] = ()) -> Iterator[Path]:
    for folder, inside, names in os.walk(root, onerror=_refuse_folder):
        left_out = {*without, "lost+found"} if folder == os.fspath(root) else without  # a file system's own
        inside[:] = [name for name in inside if not name.startswith(".") and name not in left_out]
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in suffixes:
                yield Path(folder, name)


def _refuse_folder(error: OSError) -> None:
    why = f"cannot be read ({error.strerror}); make it readable, or give a glob that leaves it out"
    raise UsageError(f"the folder {error.filename} {why}") from None
