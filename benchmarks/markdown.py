"""Tables for the docs. Without JAX, so that what runs in PyTorch's environment may import it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a line's end behind it; cells are shown as `str` does.

    Raises:
        ValueError: a row has more or fewer cells than there are heads.
    """
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"a row of {len(row)} cells under {len(heads)} heads: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "|" + "".join(f" {text} |" if (text := str(cell)) else " |" for cell in cells)
