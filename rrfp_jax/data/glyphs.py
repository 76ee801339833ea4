"""Pictures of characters with their Unicode names: images and text that are always at hand.

The font DejaVu Sans comes with matplotlib. Of its characters 5,810 have a name in Unicode 15: letters of many
scripts, braille, arrows, dominoes. Names of one kind are alike (LATIN SMALL LETTER E WITH GRAVE), so those of
characters that a model has never seen can in part be read from their pictures.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.illustrated import Parts
from rrfp_jax.data.shuffle import shuffled
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields

EM, HEIGHT, BASELINE = 22, 32, 23
"""Pixels: of the font's size, of every picture, and from its top to where letters stand."""

WIDTHS = (16, 32, 48)
"""Pixels; a picture has the least of them that holds its character."""


@dataclass(frozen=True)
class Glyphs:
    """A document is a few characters, each a picture and behind it the character's name and a line's end.

    Every character is in one document, so that splitting by document splits by character.

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
