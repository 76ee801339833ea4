"""The stages of a step as lines of a terminal: a bar each, whose letters say why it is idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from rrfp_jax.live.figures import COMPUTE, DELAYED, StageRow
from rrfp_jax.trace.idleness import CAUSES


@dataclass(frozen=True)
class Glyphs:
    """What bars are made of.

    Attributes:
        full, empty: a cell of a bar that is filled, and one that is not.
        levels: cells of a curve, the lowest first.
    """

    full: str
    empty: str
    levels: str


BLOCKS = Glyphs(full="█", empty="░", levels="▁▂▃▄▅▆▇█")
ASCII = Glyphs(full="#", empty=".", levels="_.-~=+*#")
"""For terminals that show nothing else."""


@dataclass(frozen=True)
class Mark:
    """A use of time: its letter in a bar, its style where there are colours, and what the legend says."""

    letter: str
    style: str
    meaning: str


MARKS: Mapping[str, Mark] = {
    DELAYED: Mark("+", "green dim", "kept busy by a delay that was injected"),
    **{cause: Mark(row.letter, row.style, row.legend) for cause, row in CAUSES.items()},
}
"""Whatever is not computing, which is drawn as full cells."""

COMPUTING = "green"

LEAST = 0.005
"""A smaller share has no letter in any bar that fits a screen; it is not in the legend."""

MEMORY_CELLS, SIZE_CELLS, NARROWEST_BAR = 6, 15, 10

GAP = "  "


@dataclass(frozen=True)
class Table:
    """Rows of stages, laid out for a width.

    Args:
        rows: at least one.
        width: of the terminal.
        glyphs: that it shows.
    """

    rows: Sequence[StageRow]
    width: int
    glyphs: Glyphs

    def lines(self, step: int) -> list[Text]:
        """A heading and a line for each row.

        Args:
            step: that the rows are of.
        """
        heads = [f"{'stage':>{self._name}}", f"{'rank':<{self._rank}}", self._of_bar(f"step {step}"), "busy"]
        if self._has_memory:
            limited = any(row.budget is not None for row in self.rows)
            heads.append("memory of its limit" if limited else "memory")
        return [Text(GAP.join(heads).rstrip(), style="bold"), *map(self._row, self.rows)]

    def _row(self, row: StageRow) -> Text:
        ranks = ranks_text(row.ranks)
        line = Text(f"{row.name:>{self._name}}{GAP}{ranks:<{self._rank}}{GAP}")
        for name, cells in cells_of(row.shares, self._bar):
            mark = Mark(self.glyphs.full, COMPUTING, "") if name == COMPUTE else MARKS[name]
            line.append(cells * mark.letter, mark.style)
        line.append(f"{GAP}{row.busy:>4.0%}")
        if self._has_memory:
            line.append(GAP).append_text(self._memory(row))
        return line

    def _memory(self, row: StageRow) -> Text:
        if row.peak is None:
            return Text()
        most = row.budget or max(own.peak or 0 for own in self.rows) or 1
        full = min(round(MEMORY_CELLS * row.peak / most), MEMORY_CELLS)
        bar, rest = self.glyphs.full * full, self.glyphs.empty * (MEMORY_CELLS - full)
        return Text.assemble((bar, "magenta"), (rest, "dim"), f" {size_text(row.peak, row.budget)}")

    @property
    def _has_memory(self) -> bool:
        return any(row.peak is not None for row in self.rows)

    @property
    def _name(self) -> int:
        return max(len("stage"), *(len(row.name) for row in self.rows))

    @property
    def _rank(self) -> int:
        return max(len("rank"), *(len(ranks_text(row.ranks)) for row in self.rows))

    @property
    def _bar(self) -> int:
        memory = len(GAP) + MEMORY_CELLS + 1 + SIZE_CELLS if self._has_memory else 0
        taken = self._name + self._rank + 3 * len(GAP) + len("busy") + memory
        return max(self.width - taken, NARROWEST_BAR)

    def _of_bar(self, text: str) -> str:
        return f"{text[: self._bar]:<{self._bar}}"


def legend(rows: Sequence[StageRow], glyphs: Glyphs, width: int) -> list[Text]:
    """What the letters in these rows' bars mean, in as many lines as that takes."""
    lines = [Text.assemble((glyphs.full, COMPUTING), " computes")]
    for name, mark in MARKS.items():
        if any(row.shares.get(name, 0.0) >= LEAST for row in rows):
            item = Text.assemble((mark.letter, mark.style), f" {mark.meaning}")
            if len(lines[-1]) + len(GAP) + len(item) > width:
                lines.append(item)
            else:
                lines[-1].append(GAP).append_text(item)
    return lines


def cells_of(shares: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """How many of a bar's cells each share gets: as many as all of them add up to, and none is a cell off."""
    found, total, before = [], 0.0, 0
    for name, share in shares.items():
        total += share
        end = min(round(total * width), width)
        found.append((name, end - before))
        before = end
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a few characters: "3", "0-3", "0,2"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def size_text(size: float, limit: float | None) -> str:
    """Bytes, and of how many they are: "1.21/2.00 GiB"."""
    largest = max(size, limit or 0.0)
    unit, name = next((of for of in ((2**30, "GiB"), (2**20, "MiB")) if largest >= of[0]), (2**10, "KiB"))
    digits = 2 if largest < 10 * unit else 1 if largest < 100 * unit else 0
    of = "" if limit is None else f"/{limit / unit:.{digits}f}"
    return f"{size / unit:.{digits}f}{of} {name}"
