"""Steps on paced devices are drawn, compared and explained as those of training are."""

import rrfp_jax as rrfp
from rrfp_jax.runs.paced import PacedReport
from tests.support.spoilt import spoilt


def report(name, step):
    recorded, _ = spoilt(name)
    trace = recorded.trace
    return PacedReport(
        step=step,
        step_seconds=trace.makespan,
        wall_seconds=1.25 * trace.makespan,
        bubble=trace.bubble(),
        ranks=[[stage] for stage in range(trace.stages)],
        recorded=recorded,
    )


def test_paced_steps_are_compared_and_explained():
    one, other = report("stage", 0), report("link", 7)
    assert [panel.title for panel in rrfp.compare(one, other).panels] == ["bf, step 0", "bf, step 7"]
    found = one.explain()
    assert found.sentence.startswith("Stage 2 computes 1.60 times as long as the others")
    assert abs(found.shares["between"] - 0.2) < 1e-9
