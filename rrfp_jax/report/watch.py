"""A run in a terminal: what a look at it has found, as lines that are not longer than the terminal is wide.

A stage is a bar, whose letters say why it is idle. Frames follow one another until the run has ended, or
somebody has seen enough.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap
from time import monotonic, sleep
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rrfp_jax.fields import printable
from rrfp_jax.report.legend import CAUSES
from rrfp_jax.report.look import ALIVE_SECONDS, Edge, LatestStep, Looker, Seen, State
from rrfp_jax.report.store import StepLine
from rrfp_jax.runtime.run.recorder import ENDED, Recording, RunPhase

COMPUTE, DELAYED = "compute", "delayed"
"""Of `StageTimes`, in both of which a device is busy."""

SLOWER = 1.05
"""So many times the others' time is worth a name: less is the clocks'."""

LEAST = 0.005
"""A smaller share has no letter in any bar that fits a screen; it is not in the legend."""

LONG_SECONDS, LONG_STEPS = 10.0, 5.0
"""A step that takes so many seconds, and so many times as long as usual, is worth a word."""

SETTLED_SECONDS = 10.0
"""A run that has ended for so long is not started again by its launcher."""

GAP, COMPUTING = "  ", "green"
MEMORY_CELLS, SIZE_CELLS, NARROWEST_BAR, FEWEST_ROWS, EDGE_LINES = 6, 15, 10, 3, 2
EDGE_CELLS, RANGE_CELLS = 26, 22
"""Of an edge, and of the values between which a curve runs."""


class BarCells(NamedTuple):
    """The characters of bars: a cell that is filled, one that is not, those of a curve, the lowest first."""

    full: str
    empty: str
    levels: str


BLOCKS = BarCells(full="█", empty="░", levels="▁▂▃▄▅▆▇█")
ASCII = BarCells(full="#", empty=".", levels="_.-~=+*#")
"""For terminals that show nothing else."""


MARKS: Mapping[str, tuple[str, str, str]] = {
    DELAYED: ("+", "green dim", "kept busy by a delay that was injected"),
    **{cause: (row.letter, row.style, row.title) for cause, row in CAUSES.items()},
}
"""Whatever is not computing, which is drawn as full cells: letter, style and what the legend says."""


class Window(NamedTuple):
    """Where a frame is shown; `height` is None where lines may go on for ever."""

    width: int
    height: int | None
    glyphs: BarCells


class StageRow(NamedTuple):
    """A stage, or the mean of several: busy seconds, shares of the step, and bytes, None if not known.

    `peak` is the most that it held for microbatches, of any replica, `budget` how much that may be.
    """

    name: str
    ranks: Sequence[int]
    seconds: float
    shares: Mapping[str, float]
    peak: float | None = None
    budget: float | None = None


def rows_of(latest: LatestStep, line: StepLine | None) -> list[StageRow]:
    """The stages of the replica that ended last, in order; `line` is of the latest step, for its bytes."""
    stages = latest.trace.stages
    ranks = latest.ranks[latest.trace.replica * stages :]
    given = ([], []) if line is None else (line.peak_bytes, line.budget_bytes)
    peaks, budgets = (own if len(own) == stages else [None] * stages for own in given)
    return [
        StageRow(
            name=str(stage),
            ranks=ranks[stage],
            seconds=times[COMPUTE] + times[DELAYED],
            shares={name: own / (sum(times.values()) or 1.0) for name, own in times.items()},
            peak=peaks[stage],
            budget=budgets[stage],
        )
        for stage, times in enumerate(latest.times)
    ]


def summarised(rows: Sequence[StageRow], most: int) -> list[StageRow]:
    """At most so many rows, at least two: the stages that are busy longest, in order; the others' mean."""
    if len(rows) <= most:
        return list(rows)
    slowest = sorted(range(len(rows)), key=lambda at: (-rows[at].seconds, at))[: most - 1]
    others = [row for at, row in enumerate(rows) if at not in slowest]
    mean = StageRow(
        name=f"{len(others)} more",
        ranks=(),
        seconds=fmean(row.seconds for row in others),
        shares={name: fmean(row.shares[name] for row in others) for name in rows[0].shares},
        peak=_mean(row.peak for row in others),
        budget=_mean(row.budget for row in others),
    )
    return [rows[at] for at in sorted(slowest)] + [mean]


def _mean(sizes: Iterable[float | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return fmean(known) if known else None


def slowest_of(latest: LatestStep, busy: Sequence[Sequence[Sequence[float]]]) -> str:
    """The stage replica that was busy longest, in words; "" if it is alone, or no more than a little slower.

    Args:
        latest: the latest step.
        busy: of it and of steps before it, per replica and stage (s); of other numbers of them: passed over.
    """
    replicas, stages = len(latest.trace.busy_seconds), latest.trace.stages
    like = [step for step in busy if [len(row) for row in step] == [stages] * replicas]
    flat = [fmean(step[n // stages][n % stages] for step in like) for n in range(replicas * stages)]
    at = flat.index(max(flat))
    others = flat[:at] + flat[at + 1 :]
    if not others or not median(others) or flat[at] < SLOWER * median(others):
        return ""
    replica, stage = divmod(at, stages)
    where = f"stage {stage}" + (f" of replica {replica}" if replicas > 1 else "")
    ranks = latest.ranks[at]
    who = f"{_ranks(ranks)} ({where}) {'are' if len(ranks) > 1 else 'is'}"
    steps = "" if len(like) == 1 else f" in {len(like)} steps"
    alike = [seconds for n, seconds in enumerate(flat) if n % stages == stage and n != at]
    beside = ""
    if alike and median(alike):
        beside = f", {flat[at] / median(alike):.2f} times as long as its like elsewhere"
    return f"slowest: {who} busy {flat[at] / median(others):.2f} times as long as others{steps}{beside}"


def stage_table(rows: Sequence[StageRow], step: int, width: int, glyphs: BarCells) -> list[Text]:
    """A heading and a line for each row, at least one, of a step."""
    has_memory = any(row.peak is not None for row in rows)
    name = max(len("stage"), *(len(row.name) for row in rows))
    rank = max(len("rank"), *(len(ranks_text(row.ranks)) for row in rows))
    memory = len(GAP) + MEMORY_CELLS + 1 + SIZE_CELLS if has_memory else 0
    cells = max(width - (name + rank + 3 * len(GAP) + len("busy") + memory), NARROWEST_BAR)
    heads = [f"{'stage':>{name}}", f"{'rank':<{rank}}", f"{f'step {step}'[:cells]:<{cells}}", "busy"]
    if has_memory:
        limited = any(row.budget is not None for row in rows)
        heads.append("memory of its limit" if limited else "memory")
    lines = [Text(GAP.join(heads).rstrip(), style="bold")]
    most = max(row.peak or 0 for row in rows) or 1
    for row in rows:
        line = Text(f"{row.name:>{name}}{GAP}{ranks_text(row.ranks):<{rank}}{GAP}")
        for use, count in cells_of(row.shares, cells):
            letter, style, _ = (glyphs.full, COMPUTING, "") if use == COMPUTE else MARKS[use]
            line.append(count * letter, style)
        line.append(f"{GAP}{row.shares[COMPUTE] + row.shares[DELAYED]:>4.0%}")
        if row.peak is not None:
            full = min(round(MEMORY_CELLS * row.peak / (row.budget or most)), MEMORY_CELLS)
            bar, rest = glyphs.full * full, glyphs.empty * (MEMORY_CELLS - full)
            line.append(GAP).append(bar, "magenta").append(rest, "dim")
            line.append(f" {size_text(row.peak, row.budget)}")
        lines.append(line)
    return lines


def legend(rows: Sequence[StageRow], glyphs: BarCells, width: int) -> list[Text]:
    """What the letters in these rows' bars mean, in as many lines as that takes."""
    lines = [Text.assemble((glyphs.full, COMPUTING), " computes")]
    for name, (letter, style, meaning) in MARKS.items():
        if any(row.shares.get(name, 0.0) >= LEAST for row in rows):
            item = Text.assemble((letter, style), f" {meaning}")
            if len(lines[-1]) + len(GAP) + len(item) > width:
                lines.append(item)
            else:
                lines[-1].append(GAP).append_text(item)
    return lines


def cells_of(shares: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """How many of a bar's cells each share gets: as many as all of them add up to, and none is a cell off."""
    ends = [0, *(min(round(total * width), width) for total in accumulate(shares.values()))]
    return [(name, end - begin) for name, (begin, end) in zip(shares, pairwise(ends), strict=True)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a few characters: "3", "0-3", "0,2"."""
    # Those that follow one another are equally far from their places.
    groups = groupby(enumerate(sorted(ranks)), key=lambda at: at[1] - at[0])
    runs = [[rank for _, rank in run] for _, run in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def size_text(size: float, limit: float | None) -> str:
    """Bytes, and of how many they are: "1.21/2.00 GiB"."""
    largest = max(size, limit or 0.0)
    unit, name = next((of for of in ((2**30, "GiB"), (2**20, "MiB")) if largest >= of[0]), (2**10, "KiB"))
    digits = 2 if largest < 10 * unit else 1 if largest < 100 * unit else 0
    of = "" if limit is None else f"/{limit / unit:.{digits}f}"
    return f"{size / unit:.{digits}f}{of} {name}"


def frame(seen: Seen, screen: Window) -> list[Text]:
    """The lines of a frame; stages and edges that do not fit are summarised."""
    if seen.state is State.ABSENT:
        waiting = f"{seen.folder} has not begun: waiting for it (Ctrl-C ends)"
        lines = [*map(Text, wrap(waiting, screen.width))]
    else:
        lines = [_title(seen), *map(Text, [*_figures(seen.lines), *_curves(seen, screen)])]
        lines += [Text(line, "bold red") for said in _alerts(seen) for line in wrap(said, screen.width)]
        if not seen.lines and seen.state is not State.ENDED:
            lines += map(Text, _phases(seen))
        if seen.latest is not None:
            lines += _step(seen, seen.latest, screen, used=len(lines))
    for line in lines:
        line.truncate(screen.width, overflow="crop")
        line.rstrip()
    return lines[: screen.height]


def _title(seen: Seen) -> Text:
    """The run, and how far it is; its first step is 0, as in `metrics.jsonl`."""
    title, last, steps = [str(seen.state)], seen.last, seen.steps
    if last is not None:
        of = "" if steps is None else f" of {steps}"
        is_last = steps is not None and last.step + 1 >= steps
        title.append(f"all {steps} steps" if is_last else f"step {last.step}{of}")
        title += [f"schedule {printable(last.schedule)}"] if last.schedule else []
    return Text.assemble((seen.folder.name, "bold"), GAP, GAP.join(title))


def _figures(lines: Sequence[StepLine]) -> list[str]:
    """The latest step's numbers, a line of what it learns and one of how fast it is."""
    if not lines:
        return []
    last, learns = lines[-1], []
    if last.schedule:  # of a model
        learns.append(f"loss {_number(last.loss)}")
        checked = [line for line in lines if line.validation_loss is not None]
        learns += [f"validation {_number(line.validation_loss)} (step {line.step})" for line in checked[-1:]]
        rates = {n: v for n, v in last.hyperparams.items() if n.endswith("learning_rate") and v is not None}
        learns += [f"{'lr' if len(rates) == 1 else printable(n)} {rate:.2e}" for n, rate in rates.items()]
        learns.append(f"norm {_number(last.gradient_norm)}")
    fast = [f"tasks {_seconds(last.step_seconds)}", f"whole step {_seconds(last.wall_seconds)}"]
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
    last, said = seen.last, [seen.shared] if seen.shared else []
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
    found: dict[RunPhase, list[Recording]] = defaultdict(list)
    for one in seen.recorders:
        found[one.phase].append(one)
    said = []
    for phase, those in found.items():
        lasts = max(seen.now - min(one.phase_since for one in those), 0.0)
        said.append(f"{_ranks([one.rank for one in those])}: {str(phase) or 'unknown'} for {lasts:.0f} s")
    return said or ["no step has ended yet"]


def _step(seen: Seen, latest: LatestStep, screen: Window, used: int) -> list[Text]:
    """Who is slowest, stages as bars, edges; `used` lines are above."""
    rows, edges = rows_of(latest, seen.last), latest.edges
    above = [Text(line, "bold") for line in wrap(slowest_of(latest, seen.busy), screen.width)]
    if (count := len(latest.trace.busy_seconds)) > 1:
        above.append(Text(f"bars: replica {latest.trace.replica}, which ended last of {count}"))
    explained = legend(rows, screen.glyphs, screen.width)
    below = [*explained, *([Text(), *_edges(edges, screen)] if edges else [])]
    if screen.height is not None:
        rows = summarised(rows, max(screen.height - used - len(above) - len(below) - 2, FEWEST_ROWS))
    table = stage_table(rows, latest.trace.step, screen.width, screen.glyphs)
    return [*above, Text(), *table, *below]


def _edges(edges: Sequence[Edge], screen: Window) -> list[Text]:
    """Those whose messages take longest; the others are counted."""
    in_line = max(screen.width // EDGE_CELLS, 1)
    lines = EDGE_LINES if screen.height is not None else len(edges)
    shown = edges[: in_line * lines]
    more = f"; {len(edges) - len(shown)} more are faster" if len(shown) < len(edges) else ""
    items = [f"{e.source}>{e.target} {_seconds(e.median)}, {_seconds(e.worst)}" for e in shown]
    rows = [items[at : at + in_line] for at in range(0, len(items), in_line)]
    head = Text(f"from a task's end to the next stage, median and worst{more}", style="bold")
    return [head, *(Text("".join(f"{item:<{EDGE_CELLS}}" for item in row)) for row in rows)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    milliseconds = f"{seconds * 1e3:.{2 if seconds < 0.01 else 1}f} ms"
    return milliseconds if seconds < 10 else f"{seconds:.1f} s"


def shown(seen: Seen, console: Console, endless: bool) -> Text:
    """A frame for a console; an endless one may be longer than that."""
    glyphs = ASCII if console.options.ascii_only else BLOCKS
    height = None if endless else console.height
    return Text("\n", no_wrap=True).join(frame(seen, Window(console.width, height, glyphs)))


def watch(folder: Path, every: float, console: Console) -> None:
    """Show a run every so many seconds until it has ended, and leave the last frame on the terminal.

    The run need not have begun. Ctrl-C or SIGTERM end it, too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is left in order
    looker = Looker(folder)
    seen = looker.look()
    ended_at = -math.inf if seen.state is State.ENDED else math.inf
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while monotonic() - ended_at < SETTLED_SECONDS:
            live.update(shown(seen, console, endless=False), refresh=True)
            sleep(every)
            seen = looker.look()
            ended_at = min(ended_at, monotonic()) if seen.state is State.ENDED else math.inf
    console.print(shown(seen, console, endless=False))
