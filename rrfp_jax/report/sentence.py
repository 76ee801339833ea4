"""Causes of lost time in words: sentences that name stage, link or limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import median

from rrfp_jax.sim.splits import Layers, Recut
from rrfp_jax.sim.what_if import Link
from rrfp_jax.trace.idleness import CAUSES, Cause
from rrfp_jax.trace.records import RecordedStep

MEANING: Mapping[str, str] = {
    "compute": "computing",
    "delayed": "injected delays: a device is kept busy",
    **{cause: row.share for cause, row in CAUSES.items()},
    "data": "waiting for data",
    "planning": "planning the order",
    "between": "between steps: the update, and what else is not a task",
}
"""The names of shares in words."""

NOTEWORTHY = 0.03
"""A smaller share of the time is not worth a sentence."""

UNDONE_IN_PART: Mapping[tuple[str, Hashable], str] = {
    ("links", 0.5): "if they took half as long",
    ("in flight", 1): "with one more",
    ("bytes", 1.5): "with 1.5 times as many",
}
"""By a change's kind and subject: how much of a cause it undoes, if not all of it."""


def nothing(shares: Mapping[str, float]) -> str:
    """No cause is worth a sentence."""
    return (
        f"No single cause stands out: stages compute {shares['compute']:.0%} of the time, and "
        f"{shares['begin'] + shares['end']:.0%} is filling and draining the pipeline."
    )


def idle(shares: Mapping[str, float], most: Cause) -> str:
    """Nothing can be predicted, and stages are idle mostly for this cause."""
    return (
        f"Stages compute {shares['compute']:.0%} of the time. The largest other part is "
        f"{MEANING[most].removeprefix('idle: ')}: {shares[most]:.0%}."
    )


def outside(kind: str, share: float) -> str:
    """Steps wait before their tasks."""
    what = "for their data" if kind == "data" else "until their order is planned"
    return f"Steps wait {what}: {share:.0%} of the time."


def undone(
    kind: str, subject: Hashable, share: float, steps: Sequence[RecordedStep], layers: Layers | None
) -> str:
    """A cause, and what its undoing would save; arguments as for `main_cause`."""
    without = UNDONE_IN_PART.get((kind, subject), "without that")
    return f"{_cause(kind, subject, steps, layers)}: {share:.0%} of the time would be saved {without}."


def uneven(
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


def _cause(kind: str, subject: Hashable, steps: Sequence[RecordedStep], layers: Layers | None) -> str:
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
