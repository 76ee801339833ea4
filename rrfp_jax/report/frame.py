"""A frame: what a look at a run has found, as lines of a terminal, none longer than it is wide.

A stage is a bar, whose letters say why it is idle. Frames follow one another until the run has ended, or
somebody has seen enough.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import wrap
from time import monotonic, sleep

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rrfp_jax.fields import printable
from rrfp_jax.report.figures import (
    COMPUTE,
    DELAYED,
    Edge,
    LatestStep,
    Slowest,
    StageRow,
    rows_of,
    slowest_of,
    summarised,
)
from rrfp_jax.report.look import ALIVE_SECONDS, Looker, Seen, State
from rrfp_jax.report.store import StepLine
from rrfp_jax.runtime.run.recorder import ENDED, RunPhase
from rrfp_jax.trace.idleness import CAUSES


@dataclass(frozen=True)
class BarCells:
    """The characters that bars are made of.

    Attributes:
        full, empty: a cell of a bar that is filled, and one that is not.
        levels: cells of a curve, the lowest first.
    """

    full: str
    empty: str
    levels: str


BLOCKS = BarCells(full="█", empty="░", levels="▁▂▃▄▅▆▇█")
ASCII = BarCells(full="#", empty=".", levels="_.-~=+*#")
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
class StageTable:
    """Rows of stages, laid out for a width.

    Args:
        rows: at least one.
        width: of the terminal.
        glyphs: that it shows.
    """

    rows: Sequence[StageRow]
    width: int
    glyphs: BarCells

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


def legend(rows: Sequence[StageRow], glyphs: BarCells, width: int) -> list[Text]:
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


LONG_SECONDS, LONG_STEPS = 10.0, 5.0
"""A step that takes so many seconds, and so many times as long as usual, is worth a word."""

FEWEST_ROWS, EDGE_LINES = 3, 2

EDGE_CELLS, RANGE_CELLS = 26, 22
"""Of an edge, and of the values between which a curve runs."""


@dataclass(frozen=True)
class Window:
    """Where a frame is shown; `height` is None where lines may go on for ever."""

    width: int
    height: int | None
    glyphs: BarCells


def frame(seen: Seen, screen: Window) -> list[Text]:
    """The lines of a frame; stages and edges that do not fit are summarised."""
    if seen.state is State.ABSENT:
        waiting = f"{seen.folder} has not begun: waiting for it (Ctrl-C ends)"
        lines = [*map(Text, wrap(waiting, screen.width))]
    else:
        lines = [_title(seen), *map(Text, [*_figures(seen.lines), *_curves(seen, screen)])]
        lines += [Text(line, "bold red") for said in _alerts(seen) for line in wrap(said, screen.width)]
        if not seen.lines:
            lines += map(Text, _phases(seen))
        if seen.latest is not None:
            lines += _step(seen, seen.latest, screen, used=len(lines))
    for line in lines:
        line.truncate(screen.width, overflow="crop")
        line.rstrip()
    return lines[: screen.height]


def _title(seen: Seen) -> Text:
    title, last = [str(seen.state)], seen.last
    if last is not None:
        title.append(_progress(last.step, seen.steps))
    if last is not None and last.schedule:
        title.append(f"schedule {printable(last.schedule)}")
    return Text.assemble((seen.folder.name, "bold"), GAP, GAP.join(title))


def _progress(step: int, steps: int | None) -> str:
    """How far the run is; its first step is 0, as in `metrics.jsonl`."""
    if steps is None:
        return f"step {step}"
    return f"step {step} of {steps}" if step + 1 < steps else f"all {steps} steps"


def _figures(lines: Sequence[StepLine]) -> list[str]:
    """The latest step's numbers, a line of what it learns and one of how fast it is."""
    if not lines:
        return []
    last, fast, learns = lines[-1], [], []
    if last.schedule:  # of a model
        learns.append(f"loss {_number(last.loss)}")
        checked = [line for line in lines if line.validation_loss is not None]
        learns += [f"validation {_number(line.validation_loss)} (step {line.step})" for line in checked[-1:]]
        rates = {n: v for n, v in last.hyperparams.items() if n.endswith("learning_rate") and v is not None}
        learns += [
            f"{'lr' if len(rates) == 1 else printable(name)} {rate:.2e}" for name, rate in rates.items()
        ]
        learns.append(f"norm {_number(last.gradient_norm)}")
    fast += [f"tasks {_seconds(last.step_seconds)}", f"whole step {_seconds(last.wall_seconds)}"]
    if last.tokens_per_second is not None:
        fast += [f"waiting for data {_seconds(last.load_seconds)}", f"{last.tokens_per_second:,.0f} tokens/s"]
    return [GAP.join(line) for line in (learns, fast) if line]


def _curves(seen: Seen, screen: Window) -> list[str]:
    """The latest steps' times and losses, side by side."""
    if len(seen.lines) < 2:
        return []
    times = [line.wall_seconds for line in seen.lines]
    curves: list[tuple[str, list[float], Callable[[float], str]]] = [("steps", times, _seconds)]
    losses = [line.loss for line in seen.lines if line.loss is not None]
    if len(losses) > 1:
        curves.append(("loss", losses, _number))
    each = screen.width // len(curves) - len(GAP)
    said = []
    for name, values, text in curves:
        shown = values[-max(each - len(name) - RANGE_CELLS, 1) :]
        ends = f"{text(min(shown))} to {text(max(shown))}"
        said.append(f"{name} {_curve(shown, screen.glyphs.levels)} {ends}".ljust(each))
    return [GAP.join(said)]


def _curve(values: Sequence[float], levels: str) -> str:
    top = len(levels) - 1
    step = max(values) / top - min(values) / top or 1.0  # finite, whatever the values are
    lowest = min(values) / step
    return "".join(levels[min(round(value / step - lowest), top)] for value in values)


def _alerts(seen: Seen) -> list[str]:
    """What somebody should look at."""
    last, said = seen.last, []
    if seen.failed and seen.state is State.ENDED:
        said.append(f"it failed: {seen.folder}/diagnosis.txt says how")
    if last is not None and not last.applied:
        said.append(f"step {last.step} was not finite and is left out ({last.skipped} so far)")
    if seen.state is not State.RUNNING:
        return said
    waited = seen.now - seen.told_at
    usual = median(line.wall_seconds for line in seen.lines) if seen.lines else math.inf
    if waited > max(LONG_SECONDS, LONG_STEPS * usual):
        why = f"`rrfp why {seen.folder}` says what is waited for"
        said.append(f"no step has ended for {waited:.0f} s, usually one takes {_seconds(usual)}: {why}")
    for one in seen.recorders:
        silent = seen.now - one.beat
        if silent > ALIVE_SECONDS and one.phase != ENDED:
            where = f" ({printable(one.stages)})" if one.stages else ""
            said.append(f"no sign of life from rank {one.rank}{where} for {silent:.0f} s")
    return said


def _phases(seen: Seen) -> list[str]:
    """What processes are at before the first step has ended."""
    found: dict[RunPhase, list[int]] = defaultdict(list)
    since: dict[RunPhase, float] = {}
    for one in seen.recorders:
        found[one.phase].append(one.rank)
        since[one.phase] = min(since.get(one.phase, math.inf), one.phase_since)
    return [
        f"{_ranks(ranks)}: {str(phase) or 'unknown'} for {max(seen.now - since[phase], 0.0):.0f} s"
        for phase, ranks in found.items()
    ] or ["no step has ended yet"]


def _step(seen: Seen, latest: LatestStep, screen: Window, used: int) -> list[Text]:
    """Who is slowest, stages as bars, edges; `used` lines are above."""
    rows, edges = rows_of(latest, seen.last), latest.edges
    slowest = slowest_of(latest, seen.busy)
    said = "" if slowest is None else _sentence(slowest)
    above = [Text(line, "bold") for line in wrap(said, screen.width)]
    if (count := len(latest.trace.busy_seconds)) > 1:
        above.append(Text(f"bars: replica {latest.trace.replica}, which ended last of {count}"))
    explained = legend(rows, screen.glyphs, screen.width)
    below = [*explained, *([Text(), *_edges(edges, screen)] if edges else [])]
    if screen.height is not None:
        rows = summarised(rows, max(screen.height - used - len(above) - len(below) - 2, FEWEST_ROWS))
    table = StageTable(rows, screen.width, screen.glyphs)
    return [*above, Text(), *table.lines(latest.trace.step), *below]


def _sentence(slowest: Slowest) -> str:
    """Who is busy longest, in words."""
    stage = f"stage {slowest.stage}" + (f" of replica {slowest.replica}" if slowest.replicas > 1 else "")
    beside = "" if slowest.beside is None else f", {slowest.beside:.2f} times as long as its like elsewhere"
    who = f"{_ranks(slowest.ranks)} ({stage}) {'are' if len(slowest.ranks) > 1 else 'is'}"
    steps = "" if slowest.steps == 1 else f" in {slowest.steps} steps"
    return f"slowest: {who} busy {slowest.ratio:.2f} times as long as others{steps}{beside}"


def _edges(edges: Sequence[Edge], screen: Window) -> list[Text]:
    """Those whose messages take longest; the others are counted."""
    in_line = max(screen.width // EDGE_CELLS, 1)
    lines = EDGE_LINES if screen.height is not None else len(edges)
    shown = edges[: in_line * lines]
    more = f"; {len(edges) - len(shown)} more are faster" if len(shown) < len(edges) else ""
    items = [f"{e.source}>{e.target} {_seconds(e.median)}, {_seconds(e.worst)}" for e in shown]
    return [
        Text(f"from a task's end to the next stage, median and worst{more}", style="bold"),
        *(
            Text("".join(f"{item:<{EDGE_CELLS}}" for item in items[at : at + in_line]))
            for at in range(0, len(items), in_line)
        ),
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    milliseconds = f"{seconds * 1e3:.{2 if seconds < 0.01 else 1}f} ms"
    return milliseconds if seconds < 10 else f"{seconds:.1f} s"


SETTLED_SECONDS = 10.0
"""A run that has ended for so long is not started again by its launcher."""


def shown(seen: Seen, console: Console, endless: bool) -> Text:
    """A frame for a console; an endless one may be longer than that."""
    glyphs = ASCII if console.options.ascii_only else BLOCKS
    height = None if endless else console.height
    return Text("\n", no_wrap=True).join(frame(seen, Window(console.width, height, glyphs)))


def watch(folder: Path, every: float, console: Console) -> None:
    """Show a run until it has ended, and leave the last frame on the terminal; Ctrl-C or SIGTERM end it, too.

    Args:
        folder: of the run, which need not have begun.
        every: seconds between two looks.
        console: of a terminal.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is left in order
    looker = Looker(folder)
    seen = looker.look()
    ended_at = None if seen.state is not State.ENDED else monotonic() - SETTLED_SECONDS
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while ended_at is None or monotonic() - ended_at < SETTLED_SECONDS:
                live.update(shown(seen, console, endless=False), refresh=True)
                sleep(every)
                seen = looker.look()
                if seen.state is not State.ENDED:
                    ended_at = None
                elif ended_at is None:
                    ended_at = monotonic()
    except KeyboardInterrupt:
        pass
    console.print(shown(seen, console, endless=False))
