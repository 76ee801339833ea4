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
from dataclasses import dataclass

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED
from rrfp_jax.launcher.rank_end import RankEnd
from rrfp_jax.runtime.group.dispatch_hash import difference, first_difference
from rrfp_jax.runtime.processes.recording import Recording


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
