"""Where documents of text and images come from: a folder, JSON lines with paths, any sequence of examples.

As with text (`sources.py`), a source names its documents and reads one at a time. Images are opened later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rrfp_jax.data.images import IMAGE_SUFFIXES, Image
from rrfp_jax.data.sources import BadDocument, Examples, JsonSpans, find_files
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, expanded
from rrfp_jax.files import read_whole

Parts: TypeAlias = Sequence[Image | str]
"""A document from its beginning to its end: strings are text, anything else is an image."""

MARKER = "<image>"
"""Where an image stands in a text, unless said otherwise."""

LONGEST_TEXT = 2**24
"""Bytes of the file that describes an image."""


class ImageSource(Protocol):
    """Documents in a fixed order, the same on every process."""

    @property
    def names(self) -> Sequence[str]:
        """A name for every document, the same on every machine."""
        ...

    def read(self, document: int) -> Parts:
        """A document; `BadDocument` if there is none to be had."""
        ...


@dataclass(frozen=True)
class ImageFolder:
    """Images of a folder, each with the text that describes it in a file beside it: `cat.png` and `cat.txt`.

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
        try:
            text = read_whole(path.with_suffix(self.suffix), LONGEST_TEXT).decode("utf-8")
        except FileNotFoundError:
            raise BadDocument("without text") from None
        except OSError as error:
            raise BadDocument("with an unreadable text") from error
        except UnicodeDecodeError as error:
            raise BadDocument("undecodable") from error
        return parts_of(text, [path])

    @functools.cached_property
    def _files(self) -> list[tuple[str, Path]]:
        files = find_files(self.path, (*IMAGE_SUFFIXES, self.suffix.lower()))
        described = {path.with_suffix("") for _, path in files if path.suffix.lower() in IMAGE_SUFFIXES}
        return [
            (name, path)
            for name, path in files
            if path.suffix.lower() in IMAGE_SUFFIXES or path.with_suffix("") not in described
        ]


@dataclass(frozen=True)
class ImageLines(JsonSpans):
    """Files of one JSON object per line, each a document: `{"text": "<image> and that", "images": [path]}`.

    The images take the markers' places. A text without markers comes behind all of them. Paths are relative
    to a folder and must not lead out of it, by `..`, a symbolic link or a root: whoever wrote the lines may
    not be who reads them.

    Args:
        path: of the lines; see `find_files`.
        folder: that paths begin at; "" for the one that each file of lines is in.
        text: field of the text.
        images: field of the paths, a list, or one.
        marker: where an image stands.
    """

    path: str
    folder: str = ""
    text: str = "text"
    images: str = "images"
    marker: str = MARKER

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.marker:
            raise UsageError("marker='': give the text that an image stands for")

    def read(self, document: int) -> Parts:
        """The line's text, with its images where they stand."""
        text, images = _fields(self.parsed(document), self.text, self.images)
        root = expanded("folder", self.folder) if self.folder else self._spans[document].path.parent
        return parts_of(text, [_within(root, image) for image in images], self.marker)


@dataclass(frozen=True)
class ImageExamples:
    """Any sequence of dicts as documents: a list, a `datasets.Dataset`, a grain `MapDataset`.

    An image may be a `pathlib.Path`, the bytes of a file, an array uint8[H, W] or uint8[H, W, 3 or 4], a
    Pillow image, or what datasets makes of one, `{"bytes": ...}`. A plain string is none: paths in other
    people's data are for `ImageLines`.

    Args:
        examples: with `len` and indices; read by index only.
        text: field of the text.
        images: field of the images, a list, or one.
        name: what names of documents begin with.
        marker: where an image stands in a text; see `ImageLines`.
    """

    examples: Any
    text: str = "text"
    images: str = "images"
    name: str = "example"
    marker: str = MARKER

    def __post_init__(self) -> None:
        check_fields(self)
        Examples(self.examples)

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """`name:index`."""
        return Examples(self.examples, name=self.name).names

    def read(self, document: int) -> Parts:
        """The example's text, with its images where they stand."""
        try:
            example = self.examples[document]
        except Exception as error:  # one that decodes its images itself raises what it likes
            raise BadDocument("with an example that cannot be read") from error
        text, images = _fields(example, self.text, self.images)
        plain = [image.get("bytes") if isinstance(image, Mapping) else image for image in images]
        if any(isinstance(image, str) for image in plain):
            raise BadDocument("with a string for an image")
        return parts_of(text, plain, self.marker)


def parts_of(text: str, images: Sequence[Image], marker: str = MARKER) -> Parts:
    """A text in which each marker is an image; without markers all images come before it."""
    texts = text.split(marker)
    if len(texts) == 1:
        return [*images, text]
    if len(texts) - 1 != len(images):
        raise BadDocument("with more or fewer images than places for them")
    parts: list[Image | str] = [texts[0]]
    for image, behind in zip(images, texts[1:], strict=True):
        parts += [image, behind]
    return parts


def _fields(given: Any, text: str, images: str) -> tuple[str, Sequence[Any]]:
    """The text and the images of an example; what it does not have is empty."""
    if not isinstance(given, Mapping):
        raise BadDocument("no object with fields")
    found, many = given.get(text), given.get(images)
    if found is not None and not isinstance(found, str):
        raise BadDocument(f"with a field {text!r} that is no text")
    if many is None:
        many = ()
    return found or "", many if isinstance(many, (list, tuple)) else (many,)


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
