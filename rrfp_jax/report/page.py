"""A report as one HTML file that needs no network: what it says, and charts that can be zoomed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import vl_convert

from rrfp_jax.report.explanation import Explanation
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.sections import Section, sections_of
from rrfp_jax.report.two_runs import TwoRuns, both_sections

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #202020; max-width: 1180px }
body { margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0.2em } h2 { font-size: 1.1em; margin: 2em 0 0.4em }
.cause { font-size: 1.25em; border-left: 4px solid #d55e00; padding-left: 0.8em; margin: 1em 0 }
p.note { color: #606060; margin: 0.2em 0 0.6em } .chart { overflow-x: auto }
table { border-collapse: collapse }
td, th { padding: 0.15em 0.9em; text-align: right; border-bottom: 1px solid #e5e5e5 }
td:first-child, th:first-child { text-align: left }
"""

DRAW = """
const options = {actions: false, renderer: "canvas"};
Promise.all(Object.entries(specs).map(([id, spec]) => vegaEmbed("#" + id, spec, options)))
  .then(() => { document.body.dataset.drawn = "all" })
  .catch(error => { document.body.dataset.drawn = String(error) });
"""


def page(run: Run, explanation: Explanation) -> str:
    """The HTML of a run's report."""
    return _html(
        f"{run.name}: why a step takes its time",
        run.name,
        [_about(run, explanation)],
        [explanation.sentence],
        sections_of(run, explanation),
    )


def page_of_two(runs: TwoRuns) -> str:
    """The HTML of two runs side by side, on the same axes."""
    return _html(
        f"{' and '.join(runs.names)}: what differs",
        " and ".join(runs.names),
        [
            f"{name}: {_about(run, explanation)}"
            for name, run, explanation in zip(runs.names, runs.runs, runs.explanations, strict=True)
        ],
        runs.sentences,
        both_sections(runs),
    )


def _about(run: Run, explanation: Explanation) -> str:
    last = run.steps[-1].recorded
    return (
        f"{len(run.steps)} steps of {last.trace.stages} stages and {last.rules.microbatches} microbatches, "
        f"{explanation.seconds * 1e3:.1f} ms each (mean)"
    )


def _html(
    title: str, heading: str, about: Sequence[str], sentences: Sequence[str], sections: Sequence[Section]
) -> str:
    specs = {f"chart{i}": own.plot.spec() for i, own in enumerate(sections) if own.plot is not None}
    body = "".join(_section(f"chart{i}", section) for i, section in enumerate(sections))
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in about)
    causes = "".join(f'<p class="cause">{escape(sentence)}</p>' for sentence in sentences)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
{notes}
{causes}
{body}
<script>{_vega()}</script>
<script>const specs = {_inline(specs)};
{DRAW}</script></body></html>
"""


def _section(key: str, section: Section) -> str:
    place = "" if section.plot is None else f'<div class="chart"><div id="{key}"></div></div>'
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f"<h2>{escape(section.title)}</h2>{note}{place}{_table(section.table)}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    if not rows:
        return ""
    head, *others = ([escape(cell) for cell in row] for row in rows)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in others)
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{body}</table>"


def _inline(data: Any) -> str:
    """JSON inside a script: it may not end it."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as a script."""
    return str(vl_convert.javascript_bundle())  # type: ignore[call-arg]  # its stub lacks the defaults
