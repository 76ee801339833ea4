"""What matters most about some steps: of the causes of lost time the one whose undoing would save most."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from rrfp_jax.report.legend import SHARES
from rrfp_jax.report.what_if import Link
from rrfp_jax.sim.splits import Layers, Recut
from rrfp_jax.trace.records import RecordedStep, link_seconds

OUTSIDE = {
    "data": "Steps wait for their data: {:.0%} of the time.",
    "planning": "Steps wait until their order is planned: {:.0%} of the time.",
    "between": "Steps wait for what is between them, such as the update: {:.0%} of the time.",
}
"""Shares of the time outside the tasks that are causes themselves, and what is said of them."""

WHOLES: Mapping[str, object] = {"stage": ("stages", None), "link": ("links", 0.5), "jitter": ("jitter", None)}
"""For what one stage or link may cause: the kind and subject of the change that undoes it on all of them."""

MOSTLY = 0.7
"""Of what all of them cause, the share of one that is named instead."""

NOTEWORTHY = 0.03
"""A smaller share of the time is not worth a sentence."""

UNDONE_IN_PART: Mapping[tuple[str, Hashable], str] = {
    ("links", 0.5): "if they took half as long",
    ("in flight", 1): "with one more",
    ("bytes", 1.5): "with 1.5 times as many",
}
"""By a change's kind and subject: how much of a cause it undoes, if not all of it."""


class Saving(NamedTuple):
    """What one change would save, as a share of the steps' whole time; see `what_if.WhatIf`."""

    kind: str
    subject: Hashable
    change: str  # in words
    share: float


@dataclass(frozen=True)
class Finding:
    """What matters most about some steps.

    Attributes:
        kind, subject: of the change that undoes it (`what_if.WhatIf`); or of `OUTSIDE`; or "idle", with
            the largest share; or "nothing".
        share: of the time that it costs.
        sentence: the same in words.
    """

    kind: str
    subject: Hashable
    share: float
    sentence: str


def main_cause(
    steps: Sequence[RecordedStep], shares: Mapping[str, float], saved: Sequence[Saving], layers: Layers | None
) -> Finding:
    """The cause that costs most.

    Args:
        steps: at least one.
        shares: of their time, as an `Explanation` has them.
        saved: by changes, the largest first; empty if that is not known.
        layers: of their model; None if what they have to do is not known.
    """
    causes = [*_candidates(saved, shares), *(Saving(name, None, "", shares[name]) for name in OUTSIDE)]
    kind, subject, _, share = max(causes, key=lambda cause: cause.share)
    most = max((name for name in SHARES if name != "compute"), key=lambda name: shares[name])
    if not saved and shares[most] > share:  # what most is lost to, where nothing can be predicted
        kind, subject, share = "idle", most, shares[most]
        part = f"{SHARES[most].words.removeprefix('idle: ')}: {share:.0%}"
        said = f"Stages compute {shares['compute']:.0%} of the time. The largest other part is {part}."
    elif share < NOTEWORTHY:
        kind, subject = "nothing", None
        said = (
            f"No single cause stands out: stages compute {shares['compute']:.0%} of the time, and "
            f"{shares['begin'] + shares['end']:.0%} is filling and draining the pipeline."
        )
    elif kind in OUTSIDE:
        said = OUTSIDE[kind].format(share)
    elif kind in ("split", "uneven"):
        assert layers is not None
        said = _uneven(steps, layers, saved, share)
    else:
        without = UNDONE_IN_PART.get((kind, subject), "without that")
        cause = _in_words(kind, subject, steps, layers)
        said = f"{cause}: {share:.0%} of the time would be saved {without}."
    return Finding(kind, subject, share, said)


def _candidates(saved: Sequence[Saving], shares: Mapping[str, float]) -> list[Saving]:
    """Causes that changes would undo, but for those that others explain."""
    undone = [change for change in saved if change.kind != "schedule"]
    one_way = {cause.subject: cause.share for cause in undone if cause.kind == "link"}

    def is_of_one_way(cause: Saving) -> bool:
        """Whether it is a link there and back, of which one way explains most."""
        ways = ways_of(cause.subject) if cause.kind == "link" else ()
        return len(ways) > 1 and any(one_way.get(way, 0.0) >= MOSTLY * cause.share for way in ways)

    causes = [cause for cause in undone if cause[:2] != ("links", 0.0) and not is_of_one_way(cause)]
    for one, of_all in WHOLES.items():
        whole = [cause for cause in causes if cause[:2] == of_all]
        single = [cause for cause in causes if cause.kind == one and cause[:2] != of_all]
        explained = _most(single) >= MOSTLY * _most(whole)
        causes = [cause for cause in causes if cause not in (whole if explained else single)]
    # Where one stage has more to do than others, what counts is the best that another split can do.
    best = _most([cause for cause in causes if cause.kind == "split"])
    left_out = ["uneven" if best >= NOTEWORTHY else "split"]
    if shares["memory"] < NOTEWORTHY:  # with more in flight nearly all goes faster, also where no limit holds
        left_out += ["in flight", "bytes"]
    injected = _most([cause for cause in causes if cause.kind == "injected"])
    explained_by_it = ("jitter", "link", "links")
    causes = [own for own in causes if own.kind not in explained_by_it or injected < MOSTLY * own.share]
    return [cause for cause in causes if cause.kind not in left_out]


def _most(causes: Sequence[Saving]) -> float:
    return max((cause.share for cause in causes), default=0.0)


def _uneven(steps: Sequence[RecordedStep], layers: Layers, saved: Sequence[Saving], share: float) -> str:
    """Says that one stage has more to do, and what other splits save."""
    work = [own / slow for own, slow in zip(_busy(steps), layers.shares.slowness, strict=True)]
    stage = work.index(max(work))
    ranges, placement = layers.work.ranges(), layers.placement
    own = [ranges[placement.virtual_stage(stage, chunk)] for chunk in range(placement.chunks)]
    which = " and ".join(f"{r.start} to {r.stop - 1}" if len(r) > 1 else f"{r.start}" for r in own)
    plural = "s" if sum(map(len, own)) > 1 else ""
    more = f"{_beside_others(work, stage):.2f} times as much to do as the others"
    said = f"Stage {stage} has {more} (layer{plural} {which})"
    found = [(part, recut) for _, recut, _, part in saved if isinstance(recut, Recut) and part >= NOTEWORTHY]
    if not found:
        count = len(layers.work.layers)
        best = next((part for _, recut, _, part in saved if isinstance(recut, Recut)), 0.0)
        helps = f"saves more than {best:.1%}" if best >= 0.005 else "helps"
        return f"{said}: {share:.0%} of the time; no other split of these {count} layers {helps}."
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
        usual = {way: median(took) for way, took in link_seconds(step.trace for step in steps).items()}
        own = median(usual[way] for way in ways)
        others = median(seconds for way, seconds in usual.items() if way not in ways)
        first, second = ways[0]
        name = f"between stages {first} and {second}" if len(ways) > 1 else f"from stage {first} to {second}"
        return f"The link {name} is slow ({own * 1e3:.1f} ms a message, the others {others * 1e3:.1f} ms)"
    if kind == "jitter":
        where = "all stages" if subject is None else f"stage {subject}"
        return f"Tasks of equal lengths take unequal times on {where}"
    work = "" if layers is None else " for the same work"
    return {
        "stages": f"Stages compute unequally long{work}",
        "injected": "Delays are injected into this run",
        "links": "Transfers take long on all links",
        "lengths": "Microbatches have unequal lengths",
        "in flight": f"The limit of {steps[-1].rules.limit} microbatches in flight holds forwards back",
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
