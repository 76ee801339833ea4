"""Reports in a real browser: every chart is drawn, no script complains, nothing is fetched, all fits."""

from dataclasses import replace

import pytest

from rrfp_jax.report.causes import Finding
from rrfp_jax.report.explanation import Explanation, TimedStep, explain
from rrfp_jax.report.page import page
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.store import StepLine
from rrfp_jax.trace.records import Part
from tests.support.browser import CHROMIUM, browser
from tests.support.spoilt import MICROBATCHES, large_step, spoilt

pytestmark = [
    pytest.mark.slow(reason="it starts a browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

DRAWN = "document.body && document.body.dataset.drawn"
WIDEST = 1240


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def shown(chromium, path, html):
    """Open a page, and wait for its last chart."""
    chromium.requests.clear()
    chromium.complaints.clear()
    path.write_text(html, encoding="utf-8")
    chromium.open(path, width=WIDEST)
    assert chromium.until(DRAWN) == "all"
    assert chromium.complaints == []
    assert {request.partition(":")[0] for request in chromium.requests} <= {"file", "data", "blob"}
    assert chromium.value("document.documentElement.scrollWidth") <= WIDEST
    charts = chromium.value("document.querySelectorAll('.chart').length")
    assert chromium.value("document.querySelectorAll('.chart canvas').length") == charts > 0
    return charts


def everything():
    """A run with lengths, replicas, injected delays, and a change of its schedule."""
    step, _ = spoilt("jitter")
    records = [r._replace(delayed=1e-3) if r.task.microbatch % 3 == 0 else r for r in step.trace.records]
    trace = replace(
        step.trace, parts=[Part.of(records)], busy_by_replica=[[1.0, 1.1, 1.2, 1.0], [1.0, 1.0, 2.0, 1.0]]
    )
    step = replace(step, trace=trace, buckets=["ids int32[2,64]", "ids int32[2,128]"] * (MICROBATCHES // 2))
    lines = [StepLine(j, 1.0 + j % 3, schedule="bf" if j < 5 else "1f1b") for j in range(9)]
    steps = [TimedStep(recorded=step, wall_seconds=1.1 * trace.makespan)]
    return Run(name="everything", steps=steps, history=lines, settings={"schedule": '"bf"'})


def test_every_chart_of_a_run_is_drawn(chromium, tmp_path):
    run = everything()
    assert shown(chromium, tmp_path / "page.html", page(run, explain(run.steps))) == 6
    for said in ("injected delays", "replica 1, 1.7", "Least slack: "):
        assert said in chromium.value("document.body.innerText")


def large(stages, microbatches):
    """A run of one large step, with an explanation that took no simulation."""
    step = large_step(stages, microbatches)
    span = step.trace.makespan
    finding = Finding("nothing", None, 0.0, "Large.")
    found = Explanation(
        finding=finding, steps=1, seconds=span, shares={"compute": 1.0}, savings=[], error=0.0
    )
    steps = [TimedStep(recorded=step, wall_seconds=span)]
    return Run(name="large", steps=steps, settings={}), found


@pytest.mark.parametrize(("stages", "microbatches"), [(64, 256), (512, 128)])
def test_large_steps_stay_small_and_readable(chromium, tmp_path, stages, microbatches):
    html = page(*large(stages, microbatches))
    assert len(html.encode()) < 10e6
    shown(chromium, tmp_path / "large.html", html)
    assert chromium.value("document.documentElement.scrollHeight") < 6000
    if stages == 512:
        assert " of its 512 stages, the busiest among them" in chromium.value("document.body.innerText")
