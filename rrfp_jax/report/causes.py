"""What matters most about some steps: of the causes of lost time the one whose undoing would save most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from rrfp_jax.sim.splits import Layers, Recut
from rrfp_jax.sim.what_if import Link
from rrfp_jax.trace.idleness import SHARES
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
        return Finding("nothing", None, share, _say_nothing(shares))
    if kind in OUTSIDE:
        said = _say_outside(kind, share)
    elif kind in ("split", "uneven"):
        assert layers is not None
        splits = [(part, recut) for k, recut, part in saved if k == "split"]
        said = _say_uneven(steps, layers, splits, share)
    else:
        said = _say_undone(kind, subject, share, steps, layers)
    return Finding(kind, subject, share, said)


def _idle(shares: Mapping[str, float]) -> Finding:
    """What stages mostly wait for, where no change can be predicted."""
    most = max(Idleness, key=lambda cause: shares[cause])
    return Finding("idle", most, shares[most], _say_idle(shares, most))


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


NOTEWORTHY = 0.03
"""A smaller share of the time is not worth a sentence."""

UNDONE_IN_PART: Mapping[tuple[str, Hashable], str] = {
    ("links", 0.5): "if they took half as long",
    ("in flight", 1): "with one more",
    ("bytes", 1.5): "with 1.5 times as many",
}
"""By a change's kind and subject: how much of a cause it undoes, if not all of it."""


def _say_nothing(shares: Mapping[str, float]) -> str:
    """No cause is worth a sentence."""
    return (
        f"No single cause stands out: stages compute {shares['compute']:.0%} of the time, and "
        f"{shares['begin'] + shares['end']:.0%} is filling and draining the pipeline."
    )


def _say_idle(shares: Mapping[str, float], most: Idleness) -> str:
    """Nothing can be predicted, and stages are idle mostly for this cause."""
    return (
        f"Stages compute {shares['compute']:.0%} of the time. The largest other part is "
        f"{SHARES[most].words.removeprefix('idle: ')}: {shares[most]:.0%}."
    )


def _say_outside(kind: str, share: float) -> str:
    """Steps wait before their tasks."""
    what = "for their data" if kind == "data" else "until their order is planned"
    return f"Steps wait {what}: {share:.0%} of the time."


def _say_undone(
    kind: str, subject: Hashable, share: float, steps: Sequence[RecordedStep], layers: Layers | None
) -> str:
    """A cause, and what its undoing would save; arguments as for `main_cause`."""
    without = UNDONE_IN_PART.get((kind, subject), "without that")
    return f"{_in_words(kind, subject, steps, layers)}: {share:.0%} of the time would be saved {without}."


def _say_uneven(
    steps: Sequence[RecordedStep],
    layers: Layers,
    saved: Sequence[tuple[float, Hashable]],
    share: float,
) -> str:
    """One stage has more to do than the others.

    Args:
        steps: at least one.
        layers: of their model.
        saved: by other splits, the largest first.
        share: that the stage costs.
    """
    work = [own / slow for own, slow in zip(_busy(steps), layers.shares.slowness, strict=True)]
    stage = work.index(max(work))
    own = [
        layers.work.ranges()[layers.placement.virtual_stage(stage, c)] for c in range(layers.placement.chunks)
    ]
    which = " and ".join(f"{r.start} to {r.stop - 1}" if len(r) > 1 else f"{r.start}" for r in own)
    plural = "s" if sum(map(len, own)) > 1 else ""
    more = f"{_beside_others(work, stage):.2f} times as much to do as the others"
    said = f"Stage {stage} has {more} (layer{plural} {which})"
    found = [(part, recut) for part, recut in saved if isinstance(recut, Recut) and part >= NOTEWORTHY]
    if not found:
        count = len(layers.work.layers)
        return f"{said}: {share:.0%} of the time; no other split of these {count} layers helps."
    ways = [f"{part:.0%} of the time would be saved with {recut.change}" for part, recut in found[:1]]
    moves = [(part, recut) for part, recut in found[1:] if recut.moved is not None]
    ways += [f"{part:.0%} with {recut.change}" for part, recut in moves[:1]]
    return f"{said}: {', '.join(ways)}."


def _in_words(kind: str, subject: Hashable, steps: Sequence[RecordedStep], layers: Layers | None) -> str:
    if kind == "stage":
        assert isinstance(subject, int)
        if layers is not None:
            slowness = layers.shares.slowness[subject]
            return f"Stage {subject} takes {slowness:.2f} times as long as the others for the same work"
        ratio = _beside_others(_busy(steps), subject)
        return f"Stage {subject} computes {ratio:.2f} times as long as the others"
    if kind == "link":
        ways = ways_of(subject)
        own, others = _link_seconds(steps, ways)
        first, second = ways[0]
        name = f"between stages {first} and {second}" if len(ways) > 1 else f"from stage {first} to {second}"
        return f"The link {name} is slow ({own * 1e3:.1f} ms a message, the others {others * 1e3:.1f} ms)"
    if kind == "jitter":
        where = "all stages" if subject is None else f"stage {subject}"
        return f"Tasks of equal lengths take unequal times on {where}"
    limit = steps[-1].rules.limit
    work = "" if layers is None else " for the same work"
    return {
        "stages": f"Stages compute unequally long{work}",
        "injected": "Delays are injected into this run",
        "links": "Transfers take long on all links",
        "lengths": "Microbatches have unequal lengths",
        "in flight": f"The limit of {limit} microbatches in flight holds forwards back",
        "bytes": "The limit in bytes holds forwards back",
        "host": "The host brings tasks to their devices too late",
    }[kind]


def _beside_others(seconds: Sequence[float], stage: int) -> float:
    """How many times as long a stage takes as the others do."""
    return seconds[stage] / median([*seconds[:stage], *seconds[stage + 1 :]])


def _busy(steps: Sequence[RecordedStep]) -> list[float]:
    return [sum(step.trace.busy(stage) for step in steps) for stage in range(steps[0].trace.stages)]


def ways_of(subject: Hashable) -> Sequence[Link]:
    """The subject of a change of the kind "link" as links: one, or there and back."""
    assert isinstance(subject, tuple)
    return subject if isinstance(subject[0], tuple) else (subject,)


def _link_seconds(steps: Sequence[RecordedStep], ways: Sequence[Link]) -> tuple[float, float]:
    """Median seconds of a message on one of these links, and on the others."""
    found: dict[Link, list[float]] = defaultdict(list)
    for step in steps:
        for message in step.trace.transfers():
            found[message.sender.stage, message.receiver.stage].append(message.seconds)
    medians = {of: median(seconds) for of, seconds in found.items()}
    return median(medians[way] for way in ways), median(s for of, s in medians.items() if of not in ways)
