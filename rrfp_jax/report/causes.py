"""What matters most about some steps: of the causes of lost time the one whose undoing would save most."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.report import sentence
from rrfp_jax.report.sentence import NOTEWORTHY, ways_of
from rrfp_jax.sim.splits import Layers
from rrfp_jax.trace.idleness import Cause as Idleness
from rrfp_jax.trace.records import RecordedStep

UNDONE = (
    *("stage", "stages", "uneven", "split", "link", "links", "jitter", "lengths"),
    *("injected", "in flight", "bytes", "host"),
)
"""Kinds of changes that undo a cause."""

OUTSIDE = ("data", "planning")
"""Shares of the time outside the tasks that are causes themselves."""

WHOLES: Mapping[str, tuple[str, Hashable]] = {
    "stage": ("stages", None),
    "link": ("links", 0.5),
    "jitter": ("jitter", None),
}
"""For what one stage or link may cause: the kind and subject of the change that undoes it on all of them."""

MOSTLY = 0.7
"""Of what all of them cause, the share of one that is named instead."""

Saved: TypeAlias = tuple[str, Hashable, float]
"""Kind and subject of a change (`sim.what_if.Variant`), and the share of the whole time that it saves."""

Cause: TypeAlias = tuple[float, str, Hashable]
"""The share of the whole time that would be saved without it, and the kind and subject of that change."""


@dataclass(frozen=True)
class Finding:
    """What matters most about some steps.

    Attributes:
        kind, subject: of the change that undoes it (`sim.what_if.Variant`); or "data" or "planning", for
            which steps wait; or "nothing".
        share: of the time that it costs.
        sentence: the same in words.
    """

    kind: str
    subject: Hashable
    share: float
    sentence: str


def main_cause(
    steps: Sequence[RecordedStep],
    shares: Mapping[str, float],
    saved: Sequence[Saved],
    layers: Layers | None = None,
) -> Finding:
    """The cause that costs most.

    Args:
        steps: at least one.
        shares: of their time, as an `Explanation` has them.
        saved: by changes, the largest first; empty if that is not known.
        layers: of their model; None if what they have to do is not known.
    """
    causes: list[Cause] = [
        (share, kind, subject)
        for kind, subject, share in saved
        if kind in UNDONE and (kind, subject) != ("links", 0.0)
    ]
    causes = _on_purpose(_without_limit(_recut(_sharpened(_one_way(causes))), shares))
    causes += [(shares[name], name, None) for name in OUTSIDE]
    share, kind, subject = max(causes, key=lambda cause: cause[0])
    if not saved and (idle := _idle(shares)).share > share:
        return idle
    if share < NOTEWORTHY:
        return Finding("nothing", None, share, sentence.nothing(shares))
    if kind in OUTSIDE:
        said = sentence.outside(kind, share)
    elif kind in ("split", "uneven"):
        assert layers is not None
        splits = [(part, recut) for k, recut, part in saved if k == "split"]
        said = sentence.uneven(steps, layers, splits, share)
    else:
        said = sentence.undone(kind, subject, share, steps, layers)
    return Finding(kind, subject, share, said)


def _idle(shares: Mapping[str, float]) -> Finding:
    """What stages mostly wait for, where no change can be predicted."""
    most = max(Idleness, key=lambda cause: shares[cause])
    return Finding("idle", most, shares[most], sentence.idle(shares, most))


def _one_way(causes: Sequence[Cause]) -> list[Cause]:
    """Without a link there and back where one way explains most of it."""
    single = {subject: share for share, kind, subject in causes if kind == "link"}

    def explained(share: float, subject: Hashable) -> bool:
        return any(single.get(way, 0.0) >= MOSTLY * share for way in ways_of(subject))

    return [
        cause
        for cause in causes
        if cause[1] != "link" or len(ways_of(cause[2])) == 1 or not explained(cause[0], cause[2])
    ]


def _recut(causes: Sequence[Cause]) -> list[Cause]:
    """Where one stage has more to do than others, what counts is the best that another split can do."""
    best = max((cause for cause in causes if cause[1] == "split"), key=lambda c: c[0], default=None)
    kept = [cause for cause in causes if cause[1] not in ("split", "uneven")]
    if best is not None and best[0] >= NOTEWORTHY:
        return [*kept, best]
    return [*kept, *(cause for cause in causes if cause[1] == "uneven")]


def _on_purpose(causes: Sequence[Cause]) -> list[Cause]:
    """Without what delays that were injected explain: the jitter and the slow links are those."""
    injected = max((share for share, kind, _ in causes if kind == "injected"), default=0.0)
    return [
        cause
        for cause in causes
        if cause[1] not in ("jitter", "link", "links") or injected < MOSTLY * cause[0]
    ]


def _without_limit(causes: Sequence[Cause], shares: Mapping[str, float]) -> list[Cause]:
    """With more in flight nearly all goes faster: a limit is a cause only where it held forwards back."""
    held = shares["memory"] >= NOTEWORTHY
    return [cause for cause in causes if cause[1] not in ("in flight", "bytes") or held]


def _sharpened(causes: Sequence[Cause]) -> list[Cause]:
    """Without a cause of all stages or links where one of them explains most of it; else without those."""
    kept = list(causes)
    for one, (kind, subject) in WHOLES.items():
        whole = max((share for share, *of in causes if of == [kind, subject]), default=0.0)
        single = [cause for cause in causes if cause[1] == one and cause[2] != subject]
        if max((share for share, *_ in single), default=0.0) >= MOSTLY * whole:
            kept = [cause for cause in kept if cause[1:] != (kind, subject)]
        else:
            kept = [cause for cause in kept if cause not in single]
    return kept
