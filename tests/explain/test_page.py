"""A report's page: everything is in it, nothing is fetched, and nobody's name ends a script."""

import json
import re

import pytest

from rrfp_jax.explain.explanation import TimedStep, explain
from rrfp_jax.explain.page import page
from rrfp_jax.explain.tails import tails
from tests.support.spoilt import MICROBATCHES, STAGES, spoilt

EVIL = "a</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def html():
    step, _ = spoilt("stage")
    steps = [TimedStep(recorded=step, wall_seconds=1.1 * step.trace.makespan)]
    html = page(EVIL, steps, explain(steps))
    before, vega, after = re.split("<script>(.*?)</script>", html, maxsplit=1, flags=re.DOTALL)
    assert len(vega) > 500_000
    return before + after


def test_it_shows_all_that_there_is(html):
    (found,) = re.findall(r"const specs = (.*);\n", html)
    rows = {name: own for spec in json.loads(found).values() for name, own in spec["datasets"].items()}
    assert len(rows["tasks"]) == 2 * STAGES * MICROBATCHES
    assert {row["link"] for row in rows["links"]} == {
        "0 to 1",
        "1 to 0",
        "1 to 2",
        "2 to 1",
        "2 to 3",
        "3 to 2",
    }
    assert max(row["to"] for row in rows["shares"]) == pytest.approx(1.0, abs=2e-3)
    assert rows["savings"] and rows["critical"] and rows["idle"] and len(rows["step_times"]) == 2
    by_stage = [sum(row["share"] for row in rows["stages"] if row["stage"] == s) for s in range(STAGES)]
    assert by_stage == pytest.approx([1.0] * STAGES)
    assert "Stage 2 computes 1.60 times as long as the others" in html
    assert html.count("<tr>") == 1 + 2 * STAGES  # of the tails


def test_nothing_is_fetched_and_names_are_text(html):
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    assert EVIL not in html and "a&lt;/script&gt;" in html
    assert html.count("</script>") == 1


def test_tails_name_the_longest_task():
    step, _ = spoilt("jitter")
    for tail in tails([step.trace, step.trace]):
        own = [r for r in step.trace.records if (r.stage, r.task.kind) == (tail.stage, tail.kind)]
        longest = max(own, key=lambda r: r.end - r.start)
        assert (tail.worst, tail.microbatch) == (longest.end - longest.start, longest.task.microbatch)
        assert tail.median <= tail.p95 <= tail.worst
