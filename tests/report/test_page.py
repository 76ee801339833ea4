"""A report's page: everything is in it, nothing is fetched, and nobody's name ends a script."""

import json
import re
from html import escape

import pytest
import vl_convert

from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.page import page
from rrfp_jax.report.run_folder import Run, TwoRuns
from rrfp_jax.report.store import StepLine
from rrfp_jax.report.what_if import SPLIT_COSTS
from tests.support.spoilt import MICROBATCHES, STAGES, spoilt

EVIL = "a</script><script>alert(1)</script>"


def run_of(name, step, **settings):
    """A run of one traced step, and two lines."""
    span = step.trace.makespan
    lines = [StepLine(0, 2 * span), StepLine(1, 1.1 * span, span)]
    steps = [TimedStep(recorded=step, wall_seconds=1.1 * span)]
    return Run(name=name, steps=steps, history=lines, settings=settings)


def without_vega(html):
    before, vega, after = re.split("<script>(.*?)</script>", html, maxsplit=1, flags=re.DOTALL)
    assert len(vega) > 500_000
    return before + after


def specs_of(html):
    (found,) = re.findall(r"const specs = (.*);\n", html)
    return list(json.loads(found).values())


def timeline_of(html):
    (found,) = (spec for spec in specs_of(html) if "idle" in spec["datasets"])
    return found


@pytest.fixture(scope="module")
def run():
    return run_of(EVIL, spoilt("stage")[0], schedule='"bf"', steps="3")


@pytest.fixture(scope="module")
def html(run):
    return without_vega(page(run, explain(run.steps)))


@pytest.fixture(scope="module")
def two(run):
    other = run_of("other", spoilt("link")[0], schedule='"1f1b"', steps="3")
    return TwoRuns((run, other), (explain(run.steps), explain(other.steps)))


def test_it_shows_all_that_there_is(run, html):
    rows = {name: own for spec in specs_of(html) for name, own in spec["datasets"].items()}
    assert len(rows["tasks"]) == 2 * STAGES * MICROBATCHES
    between = {"0 to 1", "1 to 0", "1 to 2", "2 to 1", "2 to 3", "3 to 2"}
    assert {row["link"] for row in rows["links"]} == between
    inputs = [row["t"] for row in rows["tasks"] if (row["s"], row["k"]) == (2, "F: forward")]
    assert inputs and all("of stage 1, which had ended 1 ms before it was ready" in text for text in inputs)
    ends = {layer["encoding"]["x"]["scale"]["domain"][1] for layer in timeline_of(html)["layer"][:-1]}
    assert list(ends) == [pytest.approx(run.steps[0].recorded.trace.makespan * 1e3)]
    assert rows["critical"] and rows["idle"] and rows["memory"]
    assert [row["step"] for row in rows["history"]] == [0, 0, 1, 1]
    by_stage = [sum(row["x"] for row in rows["stages"] if row["s"] == s) for s in range(STAGES)]
    assert by_stage == pytest.approx([1.0] * STAGES)
    assert max(rows["heatmap"], key=lambda row: row["x"])["s"] == 2
    assert "Stage 2 computes 1.60 times as long as the others" in html
    found = explain(run.steps)
    tables = [found.share_rows(), found.saving_rows()]
    assert html.count("<tr>") == sum(map(len, tables)) and all(len(own) > 3 for own in tables)
    assert all(
        f"<td>{escape(name)}</td><td>{share}</td>" in html for own in tables for name, share in own[1:]
    )


def test_two_runs_as_text(two):
    told, seconds = str(two), two.seconds()
    assert "The link from stage 1 to 2 is slow" in told and "Stage 2 computes" in told
    for column, explanation in enumerate(two.explanations, 1):
        parts = [float(row[column].split(" ms")[0]) for row in seconds[2:]]
        assert sum(parts) == pytest.approx(explanation.seconds * 1e3, rel=2e-3)
        assert f"{explanation.sentence} {explanation.trust}" in " ".join(told.split())
    assert two.sentences[3:] == [SPLIT_COSTS], "once"
    assert two.settings()[1:] == [["schedule", '"bf"', '"1f1b"']]
    assert any("-" in row for row in two.savings()[1:])


def test_equal_names_are_told_apart(two):
    same = TwoRuns((two.runs[1],) * 2, (two.explanations[1],) * 2)
    assert same.names == ("other (1)", "other (2)")
    assert {row[3] for row in same.seconds()[1:]} == {"+0.0 ms"} and len(same.settings()) == 1
    assert same.sentences[0].startswith("Steps of both take equally long: ")


def test_nothing_is_fetched_and_names_are_text(html):
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    assert EVIL not in html and "a&lt;/script&gt;" in html
    assert html.count("</script>") == 1


def test_every_chart_can_be_drawn(html):
    specs = specs_of(html)
    assert len(specs) == 6
    for spec in specs:
        assert vl_convert.vegalite_to_svg(spec).count("<path ") > 10
