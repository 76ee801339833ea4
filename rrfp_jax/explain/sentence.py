"""What matters most about some steps, in a sentence or two that name stage, link or cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

from rrfp_jax.core.measure.recorded_step import RecordedStep

NOTEWORTHY = 0.03
"""A smaller share of the time is not worth a sentence."""

UNDONE = ("stage", "stages", "link", "links", "jitter", "lengths", "in flight", "bytes", "host")
"""Kinds of changes that undo a cause."""

WHOLES: Mapping[str, tuple[str, Hashable]] = {
    "stage": ("stages", None),
    "link": ("links", 0.5),
    "jitter": ("jitter", None),
}
"""For what one stage or link may cause: the kind and subject of the change that undoes it on all of them."""

MOSTLY = 0.7
"""Of what all of them cause, the share of one that is named instead."""

Saved: TypeAlias = tuple[str, Hashable, float]
"""Kind and subject of a change (`sim.variants.Variant`), and the share of the tasks' time that it saves."""

Cause: TypeAlias = tuple[float, str, Hashable]
"""The share of the whole time that would be saved without it, and the kind and subject of that change."""


def sentence(steps: Sequence[RecordedStep], shares: Mapping[str, float], saved: Sequence[Saved]) -> str:
    """The cause that costs most.

    Args:
        steps: at least one.
        shares: of their time, as an `Explanation` has them.
        saved: by changes, the largest first; empty if that is not known.
    """
    tasks = 1.0 - shares["data"] - shares["planning"] - shares["between"]
    causes: list[Cause] = [
        (share * tasks, kind, subject)
        for kind, subject, share in saved
        if kind in UNDONE and (kind, subject) != ("links", 0.0)
    ]
    causes = _sharpened(causes)
    outside = {"data": "Steps wait for their data", "planning": "Steps wait until their order is planned"}
    causes += [(shares[name], name, None) for name in outside]
    share, kind, subject = max(causes, key=lambda cause: cause[0])
    if share < NOTEWORTHY:
        return (
            f"No single cause stands out: stages compute {shares['compute']:.0%} of the time, and "
            f"{shares['begin'] + shares['end']:.0%} is filling and draining the pipeline."
        )
    if kind in outside:
        return f"{outside[kind]}: {share:.0%} of the time."
    without = "if they took half as long" if kind == "links" else "without that"
    return f"{_cause(kind, subject, steps)}: {share:.0%} of the time would be saved {without}."


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


def _cause(kind: str, subject: Hashable, steps: Sequence[RecordedStep]) -> str:
    if kind == "stage":
        busy = _busy(steps)
        assert isinstance(subject, int)
        ratio = busy[subject] / median(busy[:subject] + busy[subject + 1 :])
        return f"Stage {subject} computes {ratio:.2f} times as long as the others"
    if kind == "link":
        own, others = _link_seconds(steps, subject)
        assert isinstance(subject, tuple)
        return (
            f"The link from stage {subject[0]} to {subject[1]} is slow ({own * 1e3:.1f} ms a message, the "
            f"others {others * 1e3:.1f} ms)"
        )
    if kind == "jitter":
        where = "all stages" if subject is None else f"stage {subject}"
        return f"Tasks of equal lengths take unequal times on {where}"
    return {
        "stages": "Stages compute unequally long",
        "links": "Transfers take long on all links",
        "lengths": "Microbatches have unequal lengths",
        "in flight": "The limit on microbatches in flight holds forwards back",
        "bytes": "The limit in bytes holds forwards back",
        "host": "The host brings tasks to their devices too late",
    }[kind]


def _busy(steps: Sequence[RecordedStep]) -> list[float]:
    return [sum(step.trace.busy(stage) for step in steps) for stage in range(steps[0].trace.stages)]


def _link_seconds(steps: Sequence[RecordedStep], link: Hashable) -> tuple[float, float]:
    """Median seconds of a message on a link, and on the others."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for sender in step.trace.records:
            receiver = step.trace.receiver(sender)
            if receiver is not None and receiver.stage != sender.stage:
                found[sender.stage, receiver.stage].append(max(receiver.ready - sender.end, 0.0))
    medians = {of: median(seconds) for of, seconds in found.items()}
    return next(s for of, s in medians.items() if of == link), median(
        s for of, s in medians.items() if of != link
    )
