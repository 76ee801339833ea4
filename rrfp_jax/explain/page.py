"""A report as one HTML file that needs no network: the explanation, and charts that can be zoomed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import vl_convert

from rrfp_jax.core.tasks import Kind
from rrfp_jax.explain import charts
from rrfp_jax.explain.explanation import Explanation, TimedStep
from rrfp_jax.explain.plot import Plot
from rrfp_jax.explain.tails import tails
from rrfp_jax.explain.timeline_chart import timeline
from rrfp_jax.views.picture import NAMES

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #202020; max-width: 1180px }
body { margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0.2em } h2 { font-size: 1.1em; margin: 2em 0 0.4em }
.cause { font-size: 1.25em; border-left: 4px solid #d55e00; padding-left: 0.8em; margin: 1em 0 }
p.note { color: #606060; margin: 0.2em 0 0.6em } .chart { overflow-x: auto }
table { border-collapse: collapse }
td, th { padding: 0.15em 0.9em; text-align: right; border-bottom: 1px solid #e5e5e5 }
"""


class Section(NamedTuple):
    """A part of the page: a title, a note below it, and a chart if there is something to show."""

    title: str
    note: str
    plot: Plot | None


def page(name: str, steps: Sequence[TimedStep], explanation: Explanation) -> str:
    """The HTML of a report.

    Args:
        name: of the run.
        steps: the latest last.
        explanation: of them.
    """
    last = steps[-1].recorded
    sections = [
        Section(
            "Where the time went",
            "All stages of all steps shown, and what was beside their tasks.",
            charts.shares(explanation),
        ),
        Section("What if", _trust(explanation), charts.savings(explanation) if explanation.savings else None),
        Section(
            f"Step {last.trace.step}",
            "Scroll to zoom, drag to move, hover for details. Black outlines are the critical path: the "
            "chain of tasks that made the step as long as it was.",
            timeline(last),
        ),
        Section("How each stage spent it", "The same colours as above.", charts.stages(last)),
        Section(
            "Links",
            "What a message took, and its slack: how long after its arrival the stage began with it.",
            charts.links(steps) if last.trace.stages > 1 else None,
        ),
        Section("Steps", "", charts.step_times(steps)),
    ]
    specs = {f"chart{i}": own.plot.spec() for i, own in enumerate(sections) if own.plot is not None}
    body = "".join(_section(f"chart{i}", section) for i, section in enumerate(sections))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: why a step takes its time</title>
<style>{STYLE}</style></head><body>
<h1>{escape(name)}</h1>
<p class="note">{len(steps)} steps of {last.trace.stages} stages and {last.rules.microbatches} microbatches,
{explanation.seconds * 1e3:.1f} ms each (median)</p>
<p class="cause">{escape(explanation.sentence)}</p>
{body}
<h2>Tails</h2><p class="note">Of each stage and kind of task, in ms.</p>{_table(steps)}
<script>{_vega()}</script>
<script>const specs = {_inline(specs)};
const options = {{actions: false, renderer: "canvas"}};
for (const [id, spec] of Object.entries(specs)) vegaEmbed("#" + id, spec, options);
</script></body></html>
"""


def _trust(explanation: Explanation) -> str:
    return (
        f"The same steps in virtual time, with one thing changed. As they were, the simulator is "
        f"{explanation.error:.1%} off"
        + ("." if explanation.savings else ": too much to predict anything, or no change saves anything.")
    )


def _section(key: str, section: Section) -> str:
    place = "" if section.plot is None else f'<div class="chart"><div id="{key}"></div></div>'
    return f'<h2>{escape(section.title)}</h2><p class="note">{escape(section.note)}</p>{place}'


def _table(steps: Sequence[TimedStep]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("stage", "kind", "median", "p95", "worst", "worst microbatch")
    )
    rows = "".join(
        f"<tr><td>{t.stage}</td><td>{NAMES[Kind(t.kind)]}</td><td>{t.median * 1e3:.2f}</td>"
        f"<td>{t.p95 * 1e3:.2f}</td><td>{t.worst * 1e3:.2f}</td><td>{t.microbatch} in step {t.step}</td></tr>"
        for t in tails([step.recorded.trace for step in steps])
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _inline(data: Any) -> str:
    """JSON inside a script: it may not end it."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as a script."""
    return str(vl_convert.javascript_bundle())  # type: ignore[call-arg]  # its stub lacks the defaults
