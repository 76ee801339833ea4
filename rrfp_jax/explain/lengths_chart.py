"""How long tasks take by the shapes of their microbatch: durations should follow lengths, and little else."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

import altair as alt

from rrfp_jax.core.tasks import KINDS, Kind
from rrfp_jax.explain.plot import WIDTH, Plot, colours, milliseconds, thinned
from rrfp_jax.explain.tails import quantile
from rrfp_jax.trace.records import RecordedStep


def lengths(steps: Sequence[RecordedStep]) -> Plot:
    """The median of each bucket and kind, and where nine of ten tasks are."""
    found: dict[tuple[str, Kind], list[float]] = defaultdict(list)
    for step in steps:
        for record in step.trace.records:
            bucket = step.buckets[record.task.microbatch]
            found[bucket, record.task.kind].append(record.computed - record.start)
    labels = short({bucket for bucket, _ in found})
    rows = []
    for (bucket, kind), seconds in found.items():
        seconds.sort()
        low, middle, high = (milliseconds(quantile(seconds, at)) for at in (0.05, 0.5, 0.95))
        of = {"bucket": labels[bucket], "kind": KINDS[kind].title, "tasks": len(seconds)}
        rows.append(of | {"low": low, "median": middle, "high": high})
    kinds = {KINDS[kind].title: KINDS[kind].colour for kind in sorted({kind for _, kind in found})}
    x = alt.X("bucket:N", title=None, sort=[labels[bucket] for bucket in _sorted(labels)], axis=thinned())
    base = alt.Chart(alt.NamedData("lengths"), width=WIDTH - 160, height=200).encode(
        x=x,
        xOffset=alt.XOffset("kind:N", sort=list(kinds)),
        color=alt.Color("kind:N", title=None, scale=colours(kinds)),
        tooltip=["bucket:N", "kind:N", *(alt.Tooltip(f"{n}:Q") for n in ("median", "low", "high", "tasks"))],
    )
    ranges = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title="ms"), y2="high:Q")
    return Plot(ranges + base.mark_point(filled=True, size=50).encode(y="median:Q"), {"lengths": rows})


def short(buckets: set[str]) -> dict[str, str]:
    """A bucket's largest shape, such as "4 x 128", where that tells buckets apart; else its whole name."""
    found = {bucket: " x ".join(map(str, _shape(bucket))) or bucket for bucket in buckets}
    return found if len(set(found.values())) == len(found) else {bucket: bucket for bucket in buckets}


def _sorted(buckets: dict[str, str]) -> list[str]:
    """By size, then by name; names that are numbers as numbers."""

    def size(bucket: str) -> tuple[int, str]:
        return (int(bucket) if bucket.isdecimal() else math.prod(_shape(bucket))), bucket

    return sorted(buckets, key=size)


def _shape(bucket: str) -> tuple[int, ...]:
    """The largest in a bucket's name; empty if it has none."""
    texts = re.findall(r"\[([\d,]+)\]", bucket)
    return max((tuple(map(int, text.split(","))) for text in texts), key=math.prod, default=())
