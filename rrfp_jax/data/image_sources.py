"""Where documents of text and images come from: a folder, JSON lines with paths, any sequence of examples.

As with text (`sources.py`), a source names its documents and reads one at a time. Images are opened later.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.images import IMAGE_SUFFIXES, Image
from rrfp_jax.data.sampling import shuffled
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

EM, HEIGHT, BASELINE = 22, 32, 23
"""Pixels of `Glyphs`: of the font's size, of every picture, and from its top to where letters stand."""

WIDTHS = (16, 32, 48)
"""Pixels; a picture of `Glyphs` has the least of them that holds its character."""


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


@dataclass(frozen=True)
class Glyphs:
    """Characters of the font DejaVu Sans, which comes with matplotlib, and their 5,810 names of Unicode 15.

    A document is a few characters, each a picture and behind it the character's name and a line's end. Every
    character is in one document, so that splitting by document splits by character. Names of one kind are
    alike (LATIN SMALL LETTER E WITH GRAVE), so those of unseen characters can in part be read from pictures.

    Args:
        most: characters of a document, which has 1, 2 ... `most` in turn.
        seed: of which characters come together.
        blank: nothing is drawn, for a model that shall see no image but compute as much.
    """

    most: int = 4
    seed: int = 0
    blank: bool = False

    end = "\n"
    """Behind every name."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.most <= 1000:
            raise UsageError(f"most={self.most}: characters of a document; give 1 to 1000")

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Code points, such as U+0041 U+03B1."""
        return [" ".join(f"U+{code:04X}" for code in codes) for codes in self._codes]

    def read(self, document: int) -> Parts:
        """Picture, name, picture, name, ..."""
        return [
            part
            for code in self._codes[document]
            for part in (self._pictures[code], unicodedata.name(chr(code)) + self.end)
        ]

    @functools.cached_property
    def _codes(self) -> list[list[int]]:
        """Of each document."""
        every = sorted(self._pictures)
        order = shuffled(np.arange(len(every), dtype=np.uint64), len(every), self.seed).tolist()
        found: list[list[int]] = []
        begin = 0
        while begin < len(every):
            count = len(found) % self.most + 1
            found.append([every[i] for i in order[begin : begin + count]])
            begin += count
        return found

    @functools.cached_property
    def _pictures(self) -> dict[int, NDArray[np.uint8]]:
        """Of every character that has a name, by its code point; 5 MB."""
        import matplotlib
        from matplotlib.ft2font import FT2Font

        font = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"))
        font.set_size(EM, 72)  # dots per inch, so that a point is a pixel
        codes = [code for code in font.get_charmap() if unicodedata.name(chr(code), "")]
        pictures = {code: _picture(font, code) for code in codes}
        return {code: 0 * picture for code, picture in pictures.items()} if self.blank else pictures


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


def _picture(font: Any, code: int) -> NDArray[np.uint8]:
    """A character, white on black, standing on `BASELINE` and in the middle; uint8[HEIGHT, width]."""
    font.set_text(chr(code))
    font.draw_glyphs_to_bitmap(antialiased=True)
    ink = np.asarray(font.get_image())
    width = next((width for width in WIDTHS if ink.shape[1] <= width), WIDTHS[-1])
    top = round(BASELINE - font.load_char(code).bbox[3] / 64)  # in 64ths of a pixel
    ink = ink[max(-top, 0) :, :width]
    top, left = max(top, 0), (width - ink.shape[1]) // 2
    inside = ink[: HEIGHT - top]
    picture = np.zeros((HEIGHT, width), np.uint8)
    picture[top : top + len(inside), left : left + ink.shape[1]] = inside
    return picture
