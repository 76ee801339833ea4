"""What messages took on each link, beside their slack: how long after arriving the stage began with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from rrfp_jax.core.tasks import Direction
from rrfp_jax.explain.plot import WIDTH, Plot, colours, milliseconds, thinned
from rrfp_jax.explain.tails import quantile
from rrfp_jax.trace.records import StepTrace

FIGURES = {"took, median": "#0072b2", "took, p95": "#d55e00", "slack, median": "#009e73"}


class Link(NamedTuple):
    """A directed link: between which stages, in which direction of the model, and its messages' seconds."""

    sender: int
    receiver: int
    direction: Direction
    took: list[float]
    slack: list[float]

    @property
    def name(self) -> str:
        """From where to where."""
        return f"{self.sender} to {self.receiver}"


def links_of(traces: Sequence[StepTrace]) -> list[Link]:
    """All links that had messages, by direction, then by stages."""
    found: dict[tuple[Direction, int, int], list[tuple[float, float]]] = defaultdict(list)
    for trace in traces:
        for message in trace.transfers():
            sender, receiver = message
            key = sender.task.kind.direction, sender.stage, receiver.stage
            found[key].append((message.seconds, max(receiver.start - receiver.ready, 0.0)))
    return [
        Link(a, b, direction, *(list(own) for own in zip(*messages, strict=True)))
        for (direction, a, b), messages in sorted(found.items())
    ]


def links(traces: Sequence[StepTrace]) -> Plot:
    """Two rows: links that carry activations, and those that carry gradients."""
    rows = []
    for link in links_of(traces):
        carries = "activations" if link.direction is Direction.FORWARD else "gradients"
        took, slack = sorted(link.took), sorted(link.slack)
        seconds = (quantile(took, 0.5), quantile(took, 0.95), quantile(slack, 0.5))
        for what, own in zip(FIGURES, seconds, strict=True):
            rows.append({"link": link.name, "carries": carries, "what": what, "ms": milliseconds(own)})
    chart = (
        alt.Chart(alt.NamedData("links"), width=WIDTH - 160, height=120)
        .mark_point(filled=True, size=40)
        .encode(
            x=alt.X("link:N", sort=None, title=None, axis=thinned()),
            y=alt.Y("ms:Q"),
            color=alt.Color("what:N", title=None, scale=colours(FIGURES)),
            tooltip=["link:N", "carries:N", "what:N", "ms:Q"],
        )
        .facet(row=alt.Row("carries:N", title=None))
        .resolve_scale(x="independent")
    )
    return Plot(chart, {"links": rows})


def tightest(traces: Sequence[StepTrace]) -> str:
    """The link whose messages have least slack beyond what they take, in words."""
    found = links_of(traces)
    link = min(found, key=lambda link: quantile(sorted(link.slack), 0.5) - quantile(sorted(link.took), 0.5))
    took, slack = (quantile(sorted(own), 0.5) * 1e3 for own in (link.took, link.slack))
    return (
        f"Least slack: the link from stage {link.sender} to {link.receiver}, where a message takes "
        f"{took:.2f} ms and is there {slack:.2f} ms before the stage begins with it (medians)."
    )
