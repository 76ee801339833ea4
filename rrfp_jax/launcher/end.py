"""Why a run of several processes ended. Pure: no files, no processes.

`diagnose` makes a value of what each process left behind, `render_end` makes words of that.

When one rank is lost, the others end too, and each of them says that it lost somebody. Only one rank is the
cause. If the flight recorders of two ranks that share a stage hold different tasks at one position, that is
the cause: their collectives did not fit together, whatever came of that. Else the cause is, in this order of
belief:

1. a rank that says it failed by itself (or refused while others did not), with its traceback;
2. one that died of a signal that the launcher did not send. It comes first if it died before any other
   failed, except of SIGABRT, which JAX's C++ raises for the failures of others;
3. one that stood still (SIGSTOP);
4. the one that the others say they lost, through chains: 0 lost 1, which had lost 2;
5. the first to end with a status other than 0.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED
from rrfp_jax.launcher.hang import HangReport, differing_orders
from rrfp_jax.runtime.run.exits import STATUSES, ExitKind, ExitReport
from rrfp_jax.runtime.run.recorder import Recording
from rrfp_jax.runtime.run.waits import words

REFUSAL = "rrfp_jax.errors.UsageError: "
"""What Python's report of our refusals begins with."""

BY_STATUS: dict[int | None, ExitKind] = {
    REFUSED: "refused",
    INTERRUPTED: "interrupted",
    -signal.SIGINT: "interrupted",
}


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended, as far as its launcher knows."""

    rank: int
    status: int | None = None  # as `subprocess` has it: negative for a signal; None while it runs
    by_launcher: bool = False  # the launcher has sent it a signal
    stopped: bool = False  # it stood still, in process state T, when it was ended
    report: ExitReport | None = None  # what it said at its end, if it did
    recording: Recording | None = None
    log_tail: Sequence[str] = ()
    ended: float = 0.0  # in the seconds of `time.time()`

    @property
    def kind(self) -> ExitKind | None:
        """What it says of its end; without words, what its status says by convention."""
        if self.report is not None:
            return self.report.kind
        if self.by_launcher:
            return None
        if self._last_line.startswith(REFUSAL):  # before it joined the others, so Python said it
            return "refused"
        return BY_STATUS.get(self.status)

    @property
    def sentence(self) -> str:
        """Its reason; without words, its last line of output."""
        return self._last_line.removeprefix(REFUSAL) if self.report is None else self.report.sentence

    @property
    def _last_line(self) -> str:
        return next((line for line in reversed(self.log_tail) if line.strip()), "it says nothing")

    @property
    def spoke(self) -> float:
        """When it said its last words; without words, when it ended."""
        return self.ended if self.report is None else self.report.time

    @property
    def was_killed(self) -> bool:
        """Whether it died, without a word, of a signal that was not the launcher's."""
        return (self.status or 0) < 0 and not self.by_launcher and self.report is None


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended; one that is no matter of single ranks has no culprits, and has lost none."""

    kind: ExitKind
    ranks: Sequence[RankEnd] = ()  # all of the run
    culprits: Sequence[RankEnd] = ()  # that are the cause
    alike: bool = False  # all ranks are the cause, with one sentence
    cause: str = ""  # of all: why no rank moved while each lived, or which two did different tasks
    lost: Sequence[int] = ()  # the one rank that is the cause, and all that died of a signal

    @property
    def status(self) -> int:
        """The exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
        return STATUSES.get(self.kind, FAILED)


def diagnose(
    ranks: Sequence[RankEnd], *, interrupted: bool = False, stall: HangReport | None = None
) -> RunEnd:
    """Say how a run ended, naming the one rank that is the cause.

    It was `interrupted` if the launcher was told to end it while nothing was wrong. `stall` says why no rank
    moved when a wait came to its limit.
    """
    if interrupted:
        return RunEnd(kind="interrupted", ranks=ranks)
    if all(r.status == 0 for r in ranks):
        return RunEnd(kind="done", ranks=ranks)
    if all(r.kind == "refused" for r in ranks):
        return RunEnd(kind="refused", ranks=ranks)
    failed = [r for r in ranks if r.kind == "failed"]
    gave_up = any(r.report is not None and not r.report.traceback for r in failed)
    orders = differing_orders(r.recording for r in ranks if r.recording is not None)
    hung = f"it hung: {stall.sentence}" if stall is not None and gave_up else ""
    if orders is not None or hung:
        return RunEnd(kind="failed", ranks=ranks, cause=orders[2] if orders is not None else hung)
    if len(ranks) > 1 and len(failed) == len(ranks) and len({r.sentence for r in failed}) == 1:
        first = min(failed, key=lambda r: r.spoke)
        return RunEnd(kind="failed", ranks=ranks, culprits=[first], alike=True)
    culprits = _culprits(ranks)
    alone = culprits if len(culprits) == 1 else []
    kind: ExitKind = "interrupted" if any(r.kind == "interrupted" for r in alone) else "failed"
    killed = [r for r in ranks if r.was_killed and r.status != -signal.SIGABRT]  # that is JAX's for others
    lost = sorted({r.rank for r in [*killed, *alone]})
    return RunEnd(kind=kind, ranks=ranks, culprits=culprits, lost=lost)


def _culprits(ranks: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """The cause; several only if they lost one another and nothing tells them apart."""
    killed = sorted((r for r in ranks if r.was_killed), key=lambda r: (r.status == -signal.SIGABRT, r.ended))
    own = [r for r in ranks if r.kind == "failed"]
    own.sort(key=lambda r: (r.report is None or r.report.traceback is None, r.spoke))
    own += [r for r in ranks if r.kind == "refused"]
    if killed and own and killed[0].status != -signal.SIGABRT and killed[0].ended < own[0].spoke:
        own = []
    stopped = [r for r in ranks if r.stopped]
    for suspects in (own, killed, stopped, [r for r in ranks if r.kind == "interrupted"]):
        if suspects:
            return suspects[:1]
    if named := _named_by_others(ranks):
        return named
    return [min((r for r in ranks if r.status != 0), key=lambda r: (r.by_launcher, r.ended))]


def _named_by_others(ranks: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """Whom the others say they lost: the ends of their chains, or in a ring whoever is named most."""
    by_rank = {r.rank: r for r in ranks}
    lost = {
        r.rank: r.report.culprit
        for r in ranks
        if r.report is not None and r.report.culprit in by_rank and r.report.culprit != r.rank
    }
    ends: Counter[int] = Counter()
    for accuser in lost:
        at, seen = accuser, {accuser}
        while (following := lost.get(at)) is not None and following not in seen:
            at = following
            seen.add(at)
        if following is None:
            ends[at] += 1
    votes = ends or Counter(rank for rank in lost.values() if rank is not None)
    most = max(votes.values(), default=0)
    named = [by_rank[rank] for rank in sorted(votes) if votes[rank] == most]
    return named if not ends else sorted(named, key=lambda r: r.ended)[:1]


# Words.

LOG_LINES = 12
WAITS_SHOWN = 3

TRACEBACK = "Traceback (most recent call last)"

CRASH = re.compile(r"F\d{4} |terminate called|Fatal Python error")
"""How the last messages of C++, and of Python's fault handler, begin."""


def render_end(end: RunEnd) -> str:
    """The cause in a sentence, its evidence, and a line for every other rank; empty if the run is done."""
    names, lines, others = {r.rank: _name(r) for r in end.ranks}, [], end.ranks
    if end.kind == "done":
        return ""
    if end.kind == "refused":
        return _refusals(end.ranks)
    if end.cause:
        lines = [end.cause]
    elif not end.culprits:
        lines = ["interrupted"]
        others = [r for r in end.ranks if r.status == -signal.SIGKILL or r.kind == "failed"]
    elif len(end.culprits) > 1:
        lines = [f"{' and '.join(map(_name, end.culprits))} lost each other, though each was alive"]
    else:
        (culprit,) = end.culprits
        who = "all ranks" if end.alike else _name(culprit)
        lines = [f"{who} {_how(culprit)}", *_evidence(culprit, names)]
        others = [] if end.alike else [r for r in end.ranks if r is not culprit]
    return "\n".join([*lines, *(_beside(r, names) for r in others)])


def _refusals(ranks: Sequence[RankEnd]) -> str:
    """The ranks' sentences, each once with those who say it; whoever differs from most comes first."""
    said: dict[str, list[str]] = defaultdict(list)
    for rank in ranks:
        said[rank.sentence].append(_name(rank))
    if len(said) == 1:
        (text,) = said
        return f"all ranks: {text}" if len(ranks) > 1 else text
    groups = sorted(said.items(), key=lambda item: len(item[1]))
    return "\n".join(f"{', '.join(names)}: {text}" for text, names in groups)


def _name(rank: RankEnd) -> str:
    """Rank and stages: "rank 2 (stage 2)"."""
    stages = (rank.report and rank.report.stages) or (rank.recording and rank.recording.stages)
    return f"rank {rank.rank} ({stages})" if stages else f"rank {rank.rank}"


def _waits(report: ExitReport, names: dict[int, str]) -> str:
    more = len(report.waiting) - WAITS_SHOWN
    shown = (words(one, lambda n: names.get(n, f"rank {n}")) for one in report.waiting[:WAITS_SHOWN])
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _evidence(rank: RankEnd, names: dict[int, str]) -> Iterable[str]:
    """What it did last, then its traceback, what it waited for, or the end of its log."""
    report = rank.report
    lines: Sequence[str] = ()
    if rank.recording is not None:
        yield f"  it was {rank.recording.sentence(rank.spoke)}"
    if report is not None and report.traceback:
        lines = report.traceback.splitlines()
    elif report is not None and report.waiting:
        yield f"  it waited for {_waits(report, names)}"
    elif report is None and rank.kind is None and rank.status not in (0, -signal.SIGKILL) and rank.log_tail:
        yield "  the end of its log:"
        lines = _end_of_log([*rank.log_tail])
    yield from (f"    {line}".rstrip() for line in lines)


def _beside(rank: RankEnd, names: dict[int, str]) -> str:
    """A line about a rank that is not the cause."""
    status = rank.status or 0
    by = _signal_name(-status) if status < 0 else ""
    if rank.report is not None and rank.report.waiting:
        how = f"waited for {_waits(rank.report, names)}"
    elif rank.report is not None:
        how = rank.sentence.partition("\n")[0]
    elif rank.stopped:
        how = "stood still (stopped), ended by the launcher"
    elif rank.by_launcher:
        how = "ended by the launcher" + (f" ({by})" if by else "")
    else:
        how = f"killed by {by}" if by else f"exited with status {status}"
    did = "" if rank.recording is None else f", {rank.recording.sentence(rank.spoke)}"
    return f"  {_name(rank)}{did}: {how}"


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
        raised = report.sentence.partition("\n")[0]
        how = f"raised {raised}" if report.traceback else f"failed: {report.sentence}"
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
        raised = any(line.startswith(TRACEBACK) for line in rank.log_tail)
        said = f" after {rank.sentence}" if raised else f"; its last line: {rank.sentence}"
        known = any(rank.log_tail) and (status == 1 or not raised)
        return f"exited with status {status}" + (said if known else " without a message")
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
