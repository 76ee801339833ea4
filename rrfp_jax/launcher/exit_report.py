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

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rrfp_jax.errors import INTERRUPTED, REFUSED
from rrfp_jax.launcher.why.judge import HangReport
from rrfp_jax.runtime.run.consensus import first_difference
from rrfp_jax.runtime.run.exits import STATUSES, ExitKind, ExitReport
from rrfp_jax.runtime.run.recorder import Recording

REFUSAL = "rrfp_jax.errors.UsageError: "
"""What Python's report of our refusals begins with."""


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended, as far as its launcher knows.

    Attributes:
        status: as `subprocess` has it: negative for a signal; None while it runs.
        by_launcher: the launcher has sent it a signal.
        stopped: it stood still, in process state T, when it was ended.
        report: what it said at its end, if it did.
        recording: its flight recorder, if it had one.
        log_tail: its latest lines of output.
        ended: when, in the seconds of `time.time()`.
    """

    rank: int
    status: int | None = None
    by_launcher: bool = False
    stopped: bool = False
    report: ExitReport | None = None
    recording: Recording | None = None
    log_tail: Sequence[str] = ()
    ended: float = 0.0

    @property
    def kind(self) -> ExitKind | None:
        """What it says of its end; without words, what its status says by convention."""
        if self.report is not None:
            return self.report.kind
        if self.by_launcher:
            return None
        if self.last_line.startswith(REFUSAL):  # before it joined the others, so Python said it
            return "refused"
        by_status: dict[int | None, ExitKind] = {REFUSED: "refused", INTERRUPTED: "interrupted"}
        return by_status.get(INTERRUPTED if self.status == -signal.SIGINT else self.status)

    @property
    def sentence(self) -> str:
        """Its reason; without words, its last line of output."""
        return self.last_line.removeprefix(REFUSAL) if self.report is None else self.report.sentence

    @property
    def last_line(self) -> str:
        """The latest of its output that is not empty."""
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
    """How a run ended.

    Attributes:
        kind: of the end.
        ranks: all of the run.
        culprits: the ranks that are the cause; none if that is no matter of single ranks.
        alike: all ranks are the cause, with one sentence.
        orders: two ranks that dispatched different tasks, and at which position.
        hung: why no rank moved while all of them lived, if that is the cause.
        lost: the ranks without which the others could have gone on: the one that is the cause, and all that
            died of a signal; none if it is not a matter of single ranks.
    """

    kind: ExitKind
    ranks: Sequence[RankEnd] = ()
    culprits: Sequence[RankEnd] = ()
    alike: bool = False
    orders: tuple[RankEnd, RankEnd, int] | None = None
    hung: HangReport | None = None
    lost: Sequence[int] = field(default=())

    @property
    def status(self) -> int:
        """The exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
        return STATUSES[self.kind]


def diagnose(
    ranks: Sequence[RankEnd], *, interrupted: bool = False, stall: HangReport | None = None
) -> RunEnd:
    """Say how a run ended, naming the one rank that is the cause.

    Args:
        ranks: all of the run.
        interrupted: the launcher was told to end the run while nothing was wrong with it.
        stall: why no rank moved while all of them lived, if a wait has come to its limit: that ended the run.
    """
    if interrupted:
        return RunEnd(kind="interrupted", ranks=ranks)
    if all(r.status == 0 for r in ranks):
        return RunEnd(kind="done", ranks=ranks)
    if all(r.kind == "refused" for r in ranks):
        return RunEnd(kind="refused", ranks=ranks)
    gave_up = any(r.report is not None and r.kind == "failed" and not r.report.traceback for r in ranks)
    orders, hung = _differing_orders(ranks), stall if gave_up else None
    if orders is not None or hung is not None:
        return RunEnd(kind="failed", ranks=ranks, orders=orders, hung=hung)
    failed = [r for r in ranks if r.kind == "failed"]
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
    ended_badly = [r for r in ranks if r.status != 0]
    return [min(ended_badly, key=lambda r: (r.by_launcher, r.ended))]


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


def _differing_orders(ranks: Sequence[RankEnd]) -> tuple[RankEnd, RankEnd, int] | None:
    """Two ranks of a stage that dispatched different tasks, and the position."""
    recorded = [(r, r.recording) for r in ranks if r.recording is not None and r.recording.stages]
    for (one, mine), (other, theirs) in combinations(recorded, 2):
        number = first_difference(mine.tasks, theirs.tasks) if mine.stages == theirs.stages else None
        if number is not None:
            return one, other, number
    return None
