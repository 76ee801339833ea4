"""The words for how a run ended: the cause in a sentence, its evidence, and a line for every other rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from rrfp_jax.launcher.exit_report import RankEnd, RunEnd
from rrfp_jax.launcher.why.words import orders_differ, sentence
from rrfp_jax.runtime.run.waits import words

LOG_LINES = 12
WAITS_SHOWN = 3

TRACEBACK = "Traceback (most recent call last)"

CRASH = re.compile(r"F\d{4} |terminate called|Fatal Python error")
"""How the last messages of C++, and of Python's fault handler, begin."""


def render_end(end: RunEnd) -> str:
    """Why a run ended; empty if it is done."""
    return "\n".join(_Words(end).lines())


class _Words:
    """Of one end; it knows the names of all ranks."""

    def __init__(self, end: RunEnd) -> None:
        self._end = end
        self._ranks = {r.rank: r for r in end.ranks}

    def lines(self) -> Iterable[str]:
        """All lines."""
        end, others = self._end, self._end.ranks
        match end.kind:
            case "done":
                return []
            case "refused":
                return self._refusals()
            case "interrupted" if not end.culprits:
                odd = [r for r in end.ranks if r.status == -signal.SIGKILL or r.kind == "failed"]
                return ["interrupted", *map(self._beside, odd)]
        if end.orders is not None:
            one, other, number = end.orders
            assert one.recording is not None and other.recording is not None
            lines = [orders_differ(one.recording, other.recording, number)]
        elif end.hung is not None:
            lines = [f"it hung: {sentence(end.hung)}"]
        elif len(end.culprits) > 1:
            lines = [f"{' and '.join(map(self._name, end.culprits))} lost each other, though each was alive"]
        else:
            (culprit,) = end.culprits
            who = "all ranks" if end.alike else self._name(culprit)
            lines = [f"{who} {_how(culprit)}", *self._evidence(culprit)]
            others = [] if end.alike else [r for r in end.ranks if r is not culprit]
        return [*lines, *map(self._beside, others)]

    def _refusals(self) -> Iterable[str]:
        """The ranks' sentences, each once with those who say it; whoever differs from most comes first."""
        said: dict[str, list[RankEnd]] = {}
        for rank in self._end.ranks:
            said.setdefault(rank.sentence, []).append(rank)
        if len(said) == 1:
            (text,) = said
            return [f"all ranks: {text}" if len(self._ranks) > 1 else text]
        groups = sorted(said.items(), key=lambda item: len(item[1]))
        return [f"{', '.join(map(self._name, who))}: {text}" for text, who in groups]

    def _name(self, rank: RankEnd) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        stages = (rank.report and rank.report.stages) or (rank.recording and rank.recording.stages)
        return f"rank {rank.rank} ({stages})" if stages else f"rank {rank.rank}"

    def _waits(self, rank: RankEnd) -> str:
        waiting = rank.report.waiting if rank.report is not None else ()
        more = len(waiting) - WAITS_SHOWN
        names = {number: self._name(one) for number, one in self._ranks.items()}
        shown = (words(one, lambda n: names.get(n, f"rank {n}")) for one in waiting[:WAITS_SHOWN])
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")

    def _evidence(self, rank: RankEnd) -> Iterable[str]:
        """What it did last, then its traceback, what it waited for, or the end of its log."""
        if doing := _doing(rank):
            yield f"  it was {doing}"
        if rank.report is not None:
            if rank.report.traceback:
                yield from _indented(rank.report.traceback.splitlines())
            elif rank.report.waiting:
                yield f"  it waited for {self._waits(rank)}"
        elif rank.kind is None and rank.status not in (0, -signal.SIGKILL) and rank.log_tail:
            yield "  the end of its log:"
            yield from _indented(_end_of_log(rank.log_tail))

    def _beside(self, rank: RankEnd) -> str:
        """A line about a rank that is not the cause."""
        doing = _doing(rank)
        where = f"{self._name(rank)}, {doing}" if doing else self._name(rank)
        if rank.report is not None:
            waits = f"waited for {self._waits(rank)}" if rank.report.waiting else ""
            return f"  {where}: {waits or _first_line(rank.sentence)}"
        if rank.stopped:
            return f"  {where}: stood still (stopped), ended by the launcher"
        status = rank.status or 0
        by = _signal_name(-status) if status < 0 else ""
        if rank.by_launcher:
            return f"  {where}: ended by the launcher" + (f" ({by})" if by else "")
        return f"  {where}: " + (f"killed by {by}" if by else f"exited with status {status}")


def _doing(rank: RankEnd) -> str:
    """What it did last, from its flight recorder; may be empty."""
    return "" if rank.recording is None else rank.recording.sentence(rank.spoke)


def _how(rank: RankEnd) -> str:
    """How a rank ended, after its name, if it is the cause."""
    report = rank.report
    if rank.kind == "refused":
        how = f"refused: {rank.sentence}"
    elif rank.kind == "interrupted":
        how = "was interrupted"
    elif rank.stopped:
        how = "was frozen (stopped)"
    elif report is None:
        how = _how_by_status(rank)
    elif report.kind == "failed":
        how = f"raised {_first_line(report.sentence)}" if report.traceback else f"failed: {report.sentence}"
    elif report.culprit is None:
        how = f"gave up: {report.sentence}"
    else:
        how = "was cut off: it was alive, but others lost it, and it lost them"
    return how


def _how_by_status(rank: RankEnd) -> str:
    status = rank.status or 0
    if rank.by_launcher:
        return "gave no more signs of life and had to be killed"
    if status == 0:
        return "ended with status 0 while others still needed it"
    if status > 0:
        raised = status == 1 and any(line.startswith(TRACEBACK) for line in rank.log_tail)
        return f"exited with status {status}" + (f" after {rank.sentence}" if raised else " without a word")
    lost = any("JAX distributed service detected" in line for line in rank.log_tail)
    without = ", as JAX does without its coordination service" if lost else ""
    name = _signal_name(-status)
    return {
        "SIGABRT": f"aborted (SIGABRT){without}",
        "SIGKILL": "was killed by SIGKILL (sent by hand, or by the kernel for want of memory)",
    }.get(name, f"was killed by {name}")


def _end_of_log(lines: Sequence[str]) -> Sequence[str]:
    """The last lines; all of a Python traceback if they hold one, or where a crash begins."""
    crashes = [i for i, line in enumerate(lines) if CRASH.match(line)]
    if crashes:  # a dump of all threads follows
        return lines[crashes[0] : crashes[0] + LOG_LINES]
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    latest = max(len(lines) - LOG_LINES, 0)
    return lines[min([latest, *starts[-1:]]) :]


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"    {line}".rstrip() for line in lines)


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
