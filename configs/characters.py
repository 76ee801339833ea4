"""Characters as pictures with their names: documents of images and text that are always at hand.

`characters.npz` has the pictures: white on black, 32 pixels high and 16, 32 or 48 wide, drawn at 22 pixels an
em from DejaVu Sans 2.37, whose licence (dejavu-fonts.github.io) allows that.
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

END = "\n"
"""Behind every name."""


@dataclass(frozen=True)
class Characters:
    """Documents of a few characters, each a picture and behind it the character's name in Unicode.

    Every character is in one document, so that splitting by document splits by character. Names of one kind
    are alike (LATIN SMALL LETTER E WITH GRAVE), so those of unseen characters can in part be read from
    pictures.

    Args:
        most: characters of a document, which has 1, 2 ... `most` in turn.
        seed: of which characters come together.
        blank: nothing is drawn, for a model that shall see no image but compute as much.
    """

    most: int = 4
    seed: int = 0
    blank: bool = False

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Code points, such as U+0041 U+03B1."""
        return [" ".join(f"U+{code:04X}" for code in codes) for codes in self._codes]

    def read(self, document: int) -> Sequence[Any]:
        """Picture, name, picture, name, ..."""
        return [
            part
            for code in self._codes[document]
            for part in (self._pictures[code], unicodedata.name(chr(code)) + END)
        ]

    @functools.cached_property
    def _codes(self) -> list[list[int]]:
        """Of each document."""
        order = np.random.default_rng(self.seed).permutation(sorted(self._pictures)).tolist()
        found: list[list[int]] = []
        while order:
            count = len(found) % self.most + 1
            found.append(order[:count])
            del order[:count]
        return found

    @functools.cached_property
    def _pictures(self) -> dict[int, NDArray[np.uint8]]:
        """Of every character, by its code point; uint8[32, width], 4 MB."""
        with np.load(Path(__file__).with_suffix(".npz")) as stored:
            codes, widths, pixels = stored["codes"].tolist(), stored["widths"], stored["pixels"]
        if self.blank:
            pixels = np.zeros_like(pixels)
        pieces = np.split(pixels, np.cumsum(32 * widths.astype(int))[:-1])
        return {code: piece.reshape(32, -1) for code, piece in zip(codes, pieces, strict=True)}
