"""The published bubble formulas of the field's schedules, from simulated steps of constant durations."""

import pytest

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts

FORMULAS = {
    # arXiv:2104.04473, section 2.2.1: (p - 1)(t_F + t_B)
    ("1f1b", 1): lambda p, f, i, w: (p - 1) * (f + i + w),
    # arXiv:2104.04473, section 2.2.2: (p - 1)(t_F + t_B) / v for v chunks
    ("interleaved-1f1b", 2): lambda p, f, i, w: (p - 1) * (f + i + w) / 2,
    ("interleaved-1f1b", 4): lambda p, f, i, w: (p - 1) * (f + i + w) / 4,
    # arXiv:2401.10241, table 2; there B is what is I here
    ("zb-h1", 1): lambda p, f, i, w: (p - 1) * (f + i - w),
    ("zb-h2", 1): lambda p, f, i, w: (p - 1) * (f + i - 2 * w),
}


def step(name, chunks, stages, microbatches, times):
    schedule = by_name(name)
    placement = schedule.placement_for(stages, chunks)
    tables = [((float(time),) * microbatches,) * stages for time in (*times, 0, 0)]
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=schedule)
    return simulate(rules, WorkloadCosts(Workload(*tables), placement))


def bubble(trace):
    tasks = [trace.stage_records(stage) for stage in range(trace.stages)]
    return max(own[-1].end - own[0].start - sum(r.end - r.start for r in own) for own in tasks)


@pytest.mark.parametrize(("name", "chunks"), FORMULAS)
@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("times", [(4, 4, 4), (8, 8, 4), (8, 12, 8)])
def test_formula(name, chunks, stages, times):
    trace = step(name, chunks, stages, 4 * stages, times)
    assert bubble(trace) == FORMULAS[name, chunks](stages, *times)


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_a_v_has_none_if_all_parts_take_equally_long(stages):
    """arXiv:2405.15362, section 3: V-ZB, at t_F = t_I = t_W."""
    assert bubble(step("zb-v", 2, stages, 4 * stages, (4, 4, 4))) == 0


@pytest.mark.parametrize("stages", [2, 5, 8, 16])
def test_blocks_that_hold_less_have_bubbles(stages):
    """arXiv:2405.15362: more than V-ZB, less than 1F1B."""
    bubbles = {name: bubble(step(name, 2, stages, 4 * stages, (4, 4, 4))) / 4 for name in ("v-min", "v-half")}
    assert 0 < bubbles["v-min"] <= 2 * stages
    assert 0 < bubbles["v-half"] <= 1.8 * stages
    assert max(bubbles.values()) < FORMULAS["1f1b", 1](stages, 1, 1, 1)


@pytest.mark.parametrize("stages", [2, 5, 8])
def test_dual_pipe_in_a_v(stages):
    """At most DualPipe's published (p - 1)(F&B + B - 3 W) of a chunk, with F&B as F and then B."""
    f = w = 4 / 2
    b = 2 * w
    assert bubble(step("dualpipe-v", 2, stages, 4 * stages, (4, 4, 4))) <= (stages - 1) * (f + 2 * b - 3 * w)


@pytest.mark.parametrize(
    ("name", "chunks"), [*FORMULAS, ("zb-v", 2), ("v-half", 2), ("v-min", 2), ("v-zb", 2), ("dualpipe-v", 2)]
)
def test_the_bubble_does_not_grow_with_the_step(name, chunks):
    assert len({bubble(step(name, chunks, 4, microbatches, (4, 4, 4))) for microbatches in (8, 16, 40)}) == 1


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_gpipe_lasts_as_long_as_1f1b(microbatches):
    """arXiv:2104.04473, section 2.2.1: the same bubble, at more memory."""
    spans = {step(name, 1, 4, microbatches, (4, 5, 3)).makespan for name in ("gpipe", "1f1b")}
    assert spans == {(microbatches + 3) * 12}
