"""Images: read by Pillow, whatever kind of picture they are, and cut into patches.

Everything that a file may hold is checked here. An image that cannot be used is a `BadDocument`, whose second
argument is the image's name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.errors import UsageError, imported
from rrfp_jax.fields import check_fields
from rrfp_jax.files import opened_binary

Image: TypeAlias = Any
"""A path, an encoded file's bytes, uint8[H, W] or [H, W, 3 or 4], or a `PIL.Image.Image`."""

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Only what is a picture by itself: Pillow would give EPS to Ghostscript, which runs it as a program.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

MOST_PIXELS = 2**26
"""Of an image as it is stored, 192 MiB decoded; a file of a few kB can say that it has more."""

LARGEST_FILE = 2**30
"""Bytes."""

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag of how a camera was held, and its values where height and width are exchanged."""

_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By its value, what turns the picture back: Pillow's `Transpose`."""


CHANGED = "the data was changed during the run: leave it alone and start again"
"""What is told of a document that was good at the start."""


class BadDocument(ValueError):
    """A document that cannot be used; the first argument says why, in a word or two, and a second one names
    the part of it that is at fault."""

    def __str__(self) -> str:
        return " ".join(str(argument) for argument in self.args if argument)


@dataclass(frozen=True, kw_only=True)
class Patches:
    """How images become patches.

    An image is scaled so that both sides are whole numbers of `size * merge` pixels: the nearest to its own
    size, or, if its longer side has more than `longest` pixels, to that with its shape kept. It is not scaled
    up, but to one patch. Patches come row by row; with `merge=2`, squares of four do, and so do the four.

    Attributes:
        size: pixels of a patch's side.
        merge: 1, or 2 if the model joins four neighbouring patches to one image token.
        longest: pixels of the longer side, at most.
        class_token: each image begins with a patch of zeros for an encoder's class token, for which no token
            stands.
        strict: decode every image at the start, in every process, so that all bad ones are known then; False
            reads only their headers, and one that turns out to be broken later ends the run.

    Raises:
        UsageError: an impossible setting.
    """

    size: int = 14
    merge: int = 1
    longest: int = 448
    class_token: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size < 1 or self.size > 1024:
            raise UsageError(f"size={self.size}: pixels of a patch's side; give 1 to 1024")
        if self.merge not in (1, 2):
            raise UsageError(f"merge={self.merge}: give 1, or 2 to join four patches to a token")
        if self.merge == 2 and self.class_token:
            raise UsageError("merge=2 with class_token=True: four patches in a row would be no square")
        if not self.unit <= self.longest <= 2**16:
            raise UsageError(f"longest={self.longest}: pixels of a side; give {self.unit} to {2**16}")

    @property
    def unit(self) -> int:
        """Pixels of which both sides are multiples."""
        return self.size * self.merge

    @property
    def values(self) -> int:
        """Of a patch."""
        return 3 * self.size**2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of so many pixels."""
        scale = min(1.0, self.longest / max(width, height))
        most = self.longest // self.unit

        def patches(side: int) -> int:
            return self.merge * min(max(round(side * scale / self.unit), 1), most)

        return patches(height), patches(width)

    def count(self, grid: tuple[int, int]) -> int:
        """Patches of an image, its class token included."""
        return grid[0] * grid[1] + self.class_token

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8[H, W, 3], of whole units -> uint8[P, 3 * size**2], in the order of `places`."""
        rows, columns = (side // self.unit for side in pixels.shape[:2])
        m, s = self.merge, self.size
        squares = pixels.reshape(rows, m, s, columns, m, s, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        patches = squares.reshape(-1, self.values)
        return np.insert(patches, 0, 0, axis=0) if self.class_token else patches

    def places(self, rows: int, columns: int) -> NDArray[np.int32]:
        """int32[P, 2]: row and column of each patch of a grid of patches; -1 twice of a class token."""
        m = self.merge
        every: NDArray[np.int32] = np.moveaxis(np.indices((rows, columns), np.int32), 0, -1)
        places = every.reshape(rows // m, m, columns // m, m, 2).swapaxes(1, 2).reshape(-1, 2)
        return np.insert(places, 0, -1, axis=0) if self.class_token else places

    def grid_of(self, image: Image) -> tuple[int, int]:
        """Rows and columns of patches; a file is decoded for it only if `strict`; raises as `patches_of`."""
        with _opened(image) as picture:
            if self.strict:
                return self.grid(*_coloured(_upright(picture)).size)
            turned = _orientation(picture) in _TURNED and picture.format != "TIFF"  # whose header is turned
            return self.grid(*(picture.size[::-1] if turned else picture.size))

    def patches_of(self, image: Image, known: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """uint8[P, 3 * size**2], as many as `count` says of its `grid_of`, which may be known.

        Raises:
            BadDocument: the image is missing, broken, too large, of a kind that has no colours, or has not
                the known grid.
        """
        with _opened(image) as picture:
            coloured = _coloured(_upright(picture))
            rows, columns = self.grid(*coloured.size)
            if known not in (None, (rows, columns)):
                raise BadDocument("with an image of another size than before", name_of(image))
            wanted = (columns * self.size, rows * self.size)
            if coloured.size != wanted:
                coloured = coloured.resize(wanted, _pillow().Resampling.BICUBIC, reducing_gap=3.0)
            return self.cut(np.asarray(coloured, np.uint8))


def _pillow() -> Any:
    """Pillow, which is only imported where there are images."""
    return imported("PIL.Image", "data with images", "pillow")


def name_of(image: Image) -> str:
    """What messages call it; "" for one that has no name."""
    return image.name if isinstance(image, Path) else ""


@contextmanager
def _opened(image: Image) -> Iterator[Any]:
    """The picture as Pillow has it, its header read and believable.

    What Pillow's decoders raise inside is a `BadDocument`; there are many kinds, of which none is documented.
    """
    pillow = _pillow()
    try:
        if isinstance(image, pillow.Image):
            _check(image)
            yield image
        elif isinstance(image, np.ndarray):
            shapes = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))
            if image.dtype != np.uint8 or not shapes or not image.size:
                raise BadDocument("with an array that is no image")
            yield pillow.fromarray(image)
        else:
            with _file(image) as file, pillow.open(file, formats=FORMATS) as picture:
                _check(picture, name_of(image))
                yield picture
    except (BadDocument, UsageError, MemoryError):
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise BadDocument("with too large an image", name_of(image)) from error
    except pillow.UnidentifiedImageError as error:
        raise BadDocument("with a file that is no image", name_of(image)) from error
    except Exception as error:
        raise BadDocument("with a broken image", name_of(image)) from error


def _file(image: Image) -> Any:
    """The encoded image, which its user closes."""
    if isinstance(image, bytes):
        return io.BytesIO(image)
    if not isinstance(image, Path):
        raise BadDocument("with something that is no image")
    try:
        file = opened_binary(image)
    except FileNotFoundError:
        raise BadDocument("with a missing image", image.name) from None
    except OSError:
        raise BadDocument("with an unreadable image", image.name) from None
    if not 0 < (size := os.fstat(file.fileno()).st_size) <= LARGEST_FILE:
        file.close()
        raise BadDocument("with too large an image" if size else "with an empty image", image.name)
    return file


def _check(picture: Any, name: str = "") -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise BadDocument("with an empty image", name)
    if width * height > MOST_PIXELS:
        raise BadDocument("with too large an image", name)
    if picture.mode == "F":
        raise BadDocument("with an image of floating-point numbers", name)


def _orientation(picture: Any) -> int:
    """As EXIF has it; that of PNG decodes the whole image."""
    return int(_pillow().Image.getexif(picture).get(_ORIENTATION, 1))


def _upright(picture: Any) -> Any:
    """The picture as it was seen; `ImageOps.exif_transpose` fails on EXIF that it cannot write again."""
    picture.load()  # which turns TIFF, and forgets how it was
    method = _TURNS.get(_orientation(picture))
    return picture if method is None else picture.transpose(method)


def _coloured(picture: Any) -> Any:
    """Any kind of picture as red, green and blue; what is transparent lies on white."""
    pillow = _pillow()
    if picture.mode in ("I", "I;16", "I;16B", "I;16L"):  # 16 bits of grey, which Pillow would clip at 255
        grey = np.clip(np.asarray(picture).astype(np.int64), 0, 2**16 - 1)
        picture = pillow.fromarray((grey // 257).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = pillow.alpha_composite(pillow.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
