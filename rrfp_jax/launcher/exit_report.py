"""Why a run of several processes ended, from what each of them left behind. Pure: no files, no processes.

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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED
from rrfp_jax.runtime.run.consensus import difference, first_difference
from rrfp_jax.runtime.run.exits import LastWords
from rrfp_jax.runtime.run.recorder import Recording

LOG_LINES = 12
WAITS_SHOWN = 3

TRACEBACK = "Traceback (most recent call last)"

REFUSAL = "rrfp_jax.errors.UsageError: "
"""What Python's report of our refusals begins with."""

CRASH = re.compile(r"F\d{4} |terminate called|Fatal Python error")
"""How the last messages of C++, and of Python's fault handler, begin."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: as `subprocess` has it: negative for a signal.
        by_launcher: the launcher had sent it a signal before.
        stopped: it stood still, in process state T, when it was ended.
        words: what it said at its end, if it did.
        recording: its flight recorder, if it had one.
        log_tail: its latest lines of output.
        ended: when, in the seconds of `time.time()`.
    """

    rank: int
    status: int
    by_launcher: bool = False
    stopped: bool = False
    words: LastWords | None = None
    recording: Recording | None = None
    log_tail: Sequence[str] = ()
    ended: float = 0.0

    @property
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        stages = (self.words and self.words.stages) or (self.recording and self.recording.stages)
        return f"rank {self.rank} ({stages})" if stages else f"rank {self.rank}"

    @property
    def kind(self) -> str | None:
        """What it says of its end; without words, what its status says by convention."""
        if self.words is not None:
            return self.words.kind
        if self.by_launcher:
            return None
        if self._last_line.startswith(REFUSAL):  # before it joined the others, so Python said it
            return "refused"
        return {
            REFUSED: "refused",
            INTERRUPTED: "interrupted",
            -signal.SIGINT: "interrupted",
        }.get(self.status)

    @property
    def sentence(self) -> str:
        """Its reason; without words, its last line of output."""
        return self._last_line.removeprefix(REFUSAL) if self.words is None else self.words.sentence

    @property
    def _last_line(self) -> str:
        return next((line for line in reversed(self.log_tail) if line.strip()), "it says nothing")

    @property
    def doing(self) -> str:
        """What it did last, from its flight recorder or its words; may be empty."""
        if self.recording is not None:
            return self.recording.sentence(self.words.time if self.words else self.ended)
        return self.words.doing if self.words is not None else ""

    @property
    def spoke(self) -> float:
        """When it said its last words; without words, when it ended."""
        return self.words.time if self.words is not None else self.ended

    def how(self) -> str:
        """How it ended, after its name, if it is the cause."""
        if self.kind in ("refused", "interrupted"):
            return f"refused: {self.sentence}" if self.kind == "refused" else "was interrupted"
        if self.stopped:
            return "was frozen (stopped)"
        return self._how_by_status() if self.words is None else self._how_by_words(self.words)

    def _how_by_words(self, words: LastWords) -> str:
        if words.kind == "failed":
            return f"raised {_first_line(self.sentence)}" if words.traceback else f"failed: {self.sentence}"
        if words.culprit is None:
            return f"gave up: {self.sentence}"
        return "was cut off: it was alive, but others lost it, and it lost them"

    def _how_by_status(self) -> str:
        if self.by_launcher:
            return "gave no more signs of life and had to be killed"
        if self.status >= 0:
            raised = self.status == 1 and any(line.startswith(TRACEBACK) for line in self.log_tail)
            said = f" after {self.sentence}" if raised else " without a word"
            unusual = f"exited with status {self.status}{said}"
            return unusual if self.status else "ended with status 0 while others still needed it"
        name = _signal_name(-self.status)
        lost = any("JAX distributed service detected" in line for line in self.log_tail)
        without = ", as JAX does without its coordination service" if lost else ""
        hint = {
            "SIGABRT": f"aborted (SIGABRT){without}",
            "SIGKILL": "was killed by SIGKILL (sent by hand, or by the kernel for want of memory)",
        }
        return hint.get(name, f"was killed by {name}")

    def evidence(self) -> Iterable[str]:
        """Indented lines: what it did last, then its traceback, what it waited for, or the end of its log."""
        if self.doing:
            yield f"  it was {self.doing}"
        if self.words is not None:
            if self.words.traceback:
                yield from _indented(self.words.traceback.splitlines())
            elif self.words.waiting:
                yield f"  it waited for {self._waits()}"
        elif self.kind is None and self.status not in (0, -signal.SIGKILL) and self.log_tail:
            yield "  the end of its log:"
            yield from _indented(_end_of_log(self.log_tail))

    def beside(self) -> str:
        """A line about it if it is not the cause."""
        where = f"{self.name}, {self.doing}" if self.doing else self.name
        return f"{where}: {self._beside()}"

    def _beside(self) -> str:
        if self.words is not None:
            return f"waited for {self._waits()}" if self.words.waiting else _first_line(self.sentence)
        if self.stopped:
            return "stood still (stopped), ended by the launcher"
        if self.by_launcher:
            return (
                f"ended by the launcher ({_signal_name(-self.status)})"
                if self.status < 0
                else "ended by the launcher"
            )
        return (
            f"killed by {_signal_name(-self.status)}"
            if self.status < 0
            else f"exited with status {self.status}"
        )

    def _waits(self) -> str:
        waiting = self.words.waiting if self.words is not None else ()
        more = len(waiting) - WAITS_SHOWN
        return "; ".join(waiting[:WAITS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


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


@dataclass(frozen=True)
class Diagnosis:
    """How a run ended.

    Attributes:
        status: 0 done, 1 failed, 2 refused, 130 interrupted.
        text: why; empty for 0.
        lost: the ranks without which the others could have gone on: the one that is the cause, and all that
            died of a signal; none if it is not a matter of single ranks.
    """

    status: int
    text: str
    lost: Sequence[int] = ()


def diagnose(ranks: Sequence[RankEnd], *, interrupted: bool = False, stall: str = "") -> Diagnosis:
    """Say how a run ended, naming the one rank that is the cause.

    Args:
        ranks: all of the run.
        interrupted: the launcher was told to end the run while nothing was wrong with it.
        stall: why no rank moved while all of them lived, if a wait has come to its limit: that ended the run.
    """
    if interrupted:
        odd = [r for r in ranks if r.status == -signal.SIGKILL or r.kind == "failed"]
        return Diagnosis(INTERRUPTED, "\n".join(["interrupted", *(f"  {r.beside()}" for r in odd)]))
    if all(r.status == 0 for r in ranks):
        return Diagnosis(DONE, "")
    if all(r.kind == "refused" for r in ranks):
        return Diagnosis(REFUSED, _by_sentence(ranks))
    gave_up = any(r.words is not None and r.kind == "failed" and not r.words.traceback for r in ranks)
    hung = f"it hung: {stall}" if stall and gave_up else ""
    if of_all := _differing_orders(ranks) or hung:
        return Diagnosis(FAILED, "\n".join([of_all, *(f"  {r.beside()}" for r in ranks)]))
    failed = [r for r in ranks if r.kind == "failed"]
    if len(ranks) > 1 and len(failed) == len(ranks) and len({r.sentence for r in failed}) == 1:
        first = min(failed, key=lambda r: r.spoke)
        return Diagnosis(FAILED, "\n".join([f"all ranks {first.how()}", *first.evidence()]))

    culprits = _culprits(ranks)
    if len(culprits) > 1:
        names = " and ".join(r.name for r in culprits)
        lines = [f"{names} lost each other, though each was alive"]
    else:
        lines = [f"{culprits[0].name} {culprits[0].how()}", *culprits[0].evidence()]
    lines += [f"  {r.beside()}" for r in ranks if len(culprits) > 1 or r is not culprits[0]]
    broken_off = len(culprits) == 1 and culprits[0].kind == "interrupted"
    return Diagnosis(INTERRUPTED if broken_off else FAILED, "\n".join(lines), _lost(ranks, culprits))


# Who.


def _lost(ranks: Sequence[RankEnd], culprits: Sequence[RankEnd]) -> Sequence[int]:
    """See `Diagnosis.lost`; SIGABRT is JAX's for the failures of others."""
    killed = [r for r in ranks if _was_killed(r) and r.status != -signal.SIGABRT]
    return sorted({r.rank for r in [*killed, *(culprits if len(culprits) == 1 else ())]})


def _was_killed(rank: RankEnd) -> bool:
    """Whether it died, without a word, of a signal that was not the launcher's."""
    return rank.status < 0 and not rank.by_launcher and rank.words is None


def _culprits(ranks: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """The cause; several only if they lost one another and nothing tells them apart."""
    killed = list(filter(_was_killed, ranks))
    killed.sort(key=lambda r: (r.status == -signal.SIGABRT, r.ended))
    own = [r for r in ranks if r.kind == "failed"]
    own.sort(key=lambda r: (r.words is None or r.words.traceback is None, r.spoke))
    own += [r for r in ranks if r.kind == "refused"]
    if killed and own and killed[0].status != -signal.SIGABRT and killed[0].ended < own[0].spoke:
        own = []
    stopped = [r for r in ranks if r.stopped]
    for suspects in (own, killed, stopped, [r for r in ranks if r.kind == "interrupted"]):
        if suspects:
            return suspects[:1]
    if named := _named_by_others(ranks):
        return named
    ended_badly = [r for r in ranks if r.status != 0]
    return [min(ended_badly, key=lambda r: (r.by_launcher, r.ended))]


def _named_by_others(ranks: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """Whom the others say they lost: the ends of their chains, or in a ring whoever is named most."""
    by_rank = {r.rank: r for r in ranks}
    lost = {
        r.rank: r.words.culprit
        for r in ranks
        if r.words is not None and r.words.culprit in by_rank and r.words.culprit != r.rank
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


def _differing_orders(ranks: Sequence[RankEnd]) -> str:
    """Two ranks of a stage that dispatched different tasks, in words; "" if there are none."""
    groups: dict[str, list[tuple[RankEnd, Recording]]] = {}
    for rank in ranks:
        if rank.recording is not None and rank.recording.stages:
            groups.setdefault(rank.recording.stages, []).append((rank, rank.recording))
    for (one, recording), *others in groups.values():
        tasks, steps = recording.tasks, {entry.position: entry.step for entry in recording.last}
        for other, its in others:
            if (number := first_difference(tasks, its.tasks)) is not None:
                return difference(one.name, other.name, number, steps[number], tasks, its.tasks)
    return ""


def _by_sentence(ranks: Sequence[RankEnd]) -> str:
    """The ranks' sentences, each once with those who say it; whoever differs from most comes first."""
    said: dict[str, list[RankEnd]] = {}
    for rank in ranks:
        said.setdefault(rank.sentence, []).append(rank)
    if len(said) == 1:
        return f"all ranks: {ranks[0].sentence}" if len(ranks) > 1 else ranks[0].sentence
    groups = sorted(said.items(), key=lambda item: len(item[1]))
    return "\n".join(f"{', '.join(r.name for r in who)}: {sentence}" for sentence, who in groups)
