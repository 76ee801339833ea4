"""A report as one HTML file that needs no network: what it says, and charts that can be zoomed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import vl_convert

from rrfp_jax.report import charts
from rrfp_jax.report.charts import MOST_MEDIANS, Held, Plot
from rrfp_jax.report.explanation import Explanation, Rows
from rrfp_jax.report.run_folder import Run
from rrfp_jax.trace.records import RecordedStep

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #202020; max-width: 1180px }
body { margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0.2em } h2 { font-size: 1.1em; margin: 2em 0 0.4em }
.cause { font-size: 1.25em; border-left: 4px solid #41505e; padding-left: 0.8em; margin: 1em 0 }
p.note { color: #606060; margin: 0.2em 0 0.6em } .chart { overflow-x: auto }
table { border-collapse: collapse } #vg-tooltip-element { white-space: pre-line }
td, th { padding: 0.15em 0.9em; text-align: right; border-bottom: 1px solid #e5e5e5 }
td:first-child, th:first-child { text-align: left }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark }
  body { background: #1a1c1e; color: #e4e4e4 }
  p.note { color: #a9a9a9 } td, th { border-color: #3c3f42 } .cause { border-color: #8fa3b5 }
  .chart { background: white; border-radius: 6px; padding: 8px }
}
"""

DRAW = """
const options = {actions: false, renderer: "canvas"};
Promise.all(Object.entries(specs).map(([id, spec]) => vegaEmbed("#" + id, spec, options)))
  .then(() => { document.body.dataset.drawn = "all" })
  .catch(error => { document.body.dataset.drawn = String(error) });
"""


LINES = f"""\
Dashed lines are changes of schedule or learning rate, restarts, and updates that were left out. What took
more than {MOST_MEDIANS:.0f} times the median is drawn at the edge."""


class Section(NamedTuple):
    """A part of a page: a title, a note below it, and a chart or a table if there is something to show."""

    title: str
    note: str
    plot: Plot | None = None
    table: Rows = ()


def page(run: Run, explanation: Explanation) -> str:
    """The HTML of a run's report."""
    last = run.steps[-1].recorded
    size = f"{last.trace.stages} stages and {last.rules.microbatches} microbatches"
    about = f"{len(run.steps)} steps of {size}, {explanation.seconds * 1e3:.1f} ms each (mean)"
    sections = list(_sections(run, explanation))
    specs = {f"chart{i}": own.plot.readable() for i, own in enumerate(sections) if own.plot is not None}
    body = "".join(_html(f"chart{i}", section) for i, section in enumerate(sections))
    vega = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the defaults
    data = json.dumps(specs, separators=(",", ":")).replace("</", "<\\/")  # which would end the script
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(run.name)}: why a step takes its time</title>
<style>{STYLE}</style></head><body>
<h1>{escape(run.name)}</h1>
{"".join(f'<p class="note">{escape(line)}</p>' for line in (run.origin, run.shared, about) if line)}
<p class="cause">{escape(explanation.sentence)}</p>
{body}
<script>{vega}</script>
<script>const specs = {data};
{DRAW}</script></body></html>
"""


def _html(key: str, section: Section) -> str:
    place = "" if section.plot is None else f'<div class="chart"><div id="{key}"></div></div>'
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    rows = []
    for number, row in enumerate(section.table):
        kind = "td" if number else "th"
        rows.append(f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in row)}</tr>")
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return f"<h2>{escape(section.title)}</h2>{note}{place}{table}"


def _sections(run: Run, explanation: Explanation) -> Iterator[Section]:
    """From what matters most to single tasks."""
    last, traces = run.steps[-1].recorded, [step.recorded.trace for step in run.steps]
    whole = "All stages of all steps shown, and what was beside their tasks."
    yield Section("Where the time went", whole, table=explanation.share_rows())
    what_if = f"The same steps in virtual time, with one thing changed. {explanation.trust}"
    yield Section("What if", f"{what_if} {explanation.caveat}", table=explanation.saving_rows())
    replica = f", replica {last.trace.replica}" if last.trace.busy_by_replica else ""
    yield Section(f"Step {last.trace.step}{replica}", _timeline_note(last), charts.timeline(last))
    spent = "Colours are causes here; those of the timeline are passes."
    yield Section("How each stage spent it", spent, charts.stages(last))
    heat = (
        "A hot spot is a slow worker, a stripe an uneven stage, a column a step of much data; scatter is "
        "lengths. Injected delays count."
    )
    slowest = charts.slowest(traces)
    yield Section("Who is slower than the others", f"{slowest} {heat}", charts.heatmap(traces))
    yield Section("Memory", f"{charts.said_of_memory(last)} {_measured(run)}", charts.memory(last))
    if last.trace.stages > 1:
        slack = "Slack is how long after its arrival the stage begins with a message."
        yield Section("Links", f"{charts.tightest(traces)} {slack}", charts.links(traces))
    if len(run.history) > 1:
        yield Section("All steps", LINES, charts.history(run.history))


def _timeline_note(step: RecordedStep) -> str:
    """How to read it."""
    drawn, stages = len(charts.drawn_stages(step)), step.trace.stages
    some = "" if drawn == stages else f"{drawn} of its {stages} stages, the busiest among them. "
    replicas = len(step.trace.busy_by_replica)
    several = f"The replica that ended last, of {replicas}. " if replicas else ""
    return (
        f"{several}{some}Scroll to zoom, drag to move, hover for details. Black outlines are the critical "
        "path: the chain of tasks that made the step as long as it was."
    )


def _measured(run: Run) -> str:
    """What the ledger has counted in the last step: with messages and what programs need while they run."""
    line = run.history[-1] if run.history else None
    if line is None or not line.peak_bytes:
        return ""
    limits, peaks = dict(enumerate(line.budget_bytes)), enumerate(line.peak_bytes)
    own = charts.fullest([Held(stage, [(0.0, peak)], limits.get(stage), True) for stage, peak in peaks])
    most = "was closest to its budget" if own.limit else "held most"
    who = f"stage {own.stage} {most}, {charts.of_limit(own)}"
    return f"With messages, and what programs need while they run, {who} (peak_bytes of the last step)."
