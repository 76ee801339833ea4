"""The rivals: figures of runs, aims that can be missed, and, where PyTorch is, that its orders are ours."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import pytest

from benchmarks.families import LMSYS
from benchmarks.harness import REPOSITORY
from benchmarks.lateness import LateReadiness
from benchmarks.rivals import common
from benchmarks.rivals.balanced import WINDOWS, as_they_come, evenly, step_of, work
from benchmarks.rivals.common import Timed, require_torch, timed, torch_finds
from benchmarks.rivals.durations import OURS, TOLD, TORCH, Row, aims_of, joined, markdown
from benchmarks.rivals.first_step import SYSTEMS, Model
from benchmarks.rivals.null_step import aims_of as null_aims
from benchmarks.rivals.slow_link import adapted, means, warm_ups
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.families import ACTIVATION_BYTES, FORWARD_SECONDS
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal
from rrfp_jax.trace.records import peak_of_order

STAGES, MICROBATCHES = 2, 6
WORKLOAD = log_normal(STAGES, MICROBATCHES, forward=0.002, sigma=0.3, shared=0.5, seed=1)


def test_what_pytorchs_processes_use_of_ours_needs_no_jax():
    """Their environment has none."""
    files = sorted((REPOSITORY / "benchmarks" / "rivals").glob("torch_*.py"))
    code = "".join(file.read_text() for file in files)
    imports = {*re.findall(r"^from rrfp_jax\S+|^from benchmarks\.\S+\.\S+", code, re.M)}
    modules = [line.removeprefix("from ") for line in sorted(imports)]
    assert len(modules) > 3
    program = f"import sys; sys.modules['jax'] = None\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


def simulated(schedule, chunks=1, hop=0.0):
    found = by_name(schedule)
    placement = found.placement_for(STAGES, chunks)
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=found, accumulation="arrival")
    return simulate(rules, LateReadiness(WorkloadCosts(WORKLOAD, placement), hop))


def simulated_by(order, limit, workload):
    rules = StepRules(placement=order.placement, microbatches=order.microbatches, schedule=order, limit=limit)
    return simulate(rules, WorkloadCosts(workload, order.placement)).makespan


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "bf"])
def test_an_order_is_told_from_its_messages(schedule):
    late = simulated(schedule, hop=0.001)
    found = timed([late], WORKLOAD)
    assert found.step == late.makespan > found.order
    if schedule != "bf":  # which runs another order where messages are late
        assert found.order == pytest.approx(simulated(schedule).makespan)
        assert found.held == STAGES


def row(system, schedule, limit, step, held):
    return Row(system, schedule, limit, (Timed(step, step, held),))


ROWS = [
    row(TORCH, "1f1b", 0, 4.75, 8.0),
    row(TORCH, "zb-v", 0, 3.6, 8.0),
    row(TORCH, "dualpipe-v", 0, 3.5, 8.5),
    row(OURS, "1f1b", 0, 4.70, 8.0),
    row(OURS, "ranked:zb-v", 8, 3.4, 8.0),
    row(OURS, "bfw", 32, 3.1, 30.0),
    row(TOLD, "planned", 32, 2.0, 30.0),
]


@pytest.mark.parametrize(
    ("name", "step", "missed"),
    [
        ("bfw", 3.1, []),
        ("bfw", 3.3, [0]),
        ("ranked:zb-v", 3.55, [1]),
        ("1f1b", 4.76, [2]),
        ("1f1b", 4.90, [2, 3]),
        ("1f1b", 4.50, [3]),
    ],
)
def test_aims_of_durations_can_be_missed(name, step, missed):
    rows = [
        row(r.system, name, r.limit, step, r.held) if (r.system, r.schedule) == (OURS, name) else r
        for r in ROWS
    ]
    aims = aims_of(rows, 8, 32)
    assert [i for i, aim in enumerate(aims) if not aim.met] == missed
    assert "torch's best (dualpipe-v) longer than ours (bfw, limit 32)" in aims[0].name
    assert "torch's best (zb-v) longer than ours (ranked:zb-v, limit 8)" in aims[1].name


def test_a_row_is_the_mean_of_its_seeds_beside_what_holds_no_more():
    both = joined([row(OURS, "bf", 8, 3.0, 7.0), row(OURS, "bf", 8, 4.2, 8.0)])
    assert (both.step, both.held) == (pytest.approx(3.6), 8.0)
    table = markdown([*ROWS, both], 8, 32)
    assert "| ours | bf, limit 8 | 3.600 | 3.600 | 8 | 1.000 |" in table
    assert "| ours | bfw, limit 32 | 3.100 | 3.100 | 30 | 0.886 |" in table


def test_aims_of_the_null_step_compare_within_a_round():
    slow = {
        "ours, sockets": 8.0,
        "ours, nixl": 6.0,
        "ours, together": 4.0,
        "torch 1f1b": 7.0,
        "torch zb-v": 5.0,
        "torch dualpipe-v": 9.0,
    }
    rounds = [{name: {"step": k * ms} for name, ms in slow.items()} for k in (1e-3, 5e-3, 2e-3)]
    aims = null_aims(rounds)
    assert [round(aim.value, 3) for aim in aims] == [1.143, 0.857, 0.571, 1.6, 1.2, 0.8]
    assert [aim.met for aim in aims] == [False, True, True, False, False, True]


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ENVIRONMENT", tmp_path / ".venv-rivals")
    with pytest.raises(SystemExit, match=r"`make rivals` sets up \.venv-rivals"):
        require_torch()


@pytest.mark.parametrize(
    ("link", "limit", "counts"),
    [
        ((0.0, 0.0, 0.0), 8, [(7, 5, 3, 1)]),
        ((0.0, 0.025, 0.0), 16, [(10, 8, 3, 1)]),
        ((0.0, 0.0, 0.0), 4, [(4, 4, 3, 1), (4, 3, 2, 1)]),
        ((0.0, 0.025, 0.0), 6, [(6, 6, 3, 1), (6, 5, 2, 1)]),
    ],
)
def test_slackness_grows_with_the_links_as_far_as_memory_goes(link, limit, counts):
    assert warm_ups([0.01] * 4, [*link, 0.0], limit) == counts


@pytest.mark.parametrize("limit", [4, 7, 12])
def test_an_adapted_order_is_for_the_means_of_the_step_before(limit):
    before = log_normal(4, 12, forward=0.01, sigma=0.3, shared=0.5, seed=1, transfer=0.001)
    slow = replace(before, transfer_forward=(*before.transfer_forward[:2], (0.03,) * 12, (0.001,) * 12))
    orders = {name: adapted(means(step), limit) for name, step in (("usual", before), ("slow", slow))}
    times = {
        (name, step): simulated_by(order, limit, means(step))
        for name, order in orders.items()
        for step in (before, slow)
    }
    assert times["usual", before] <= times["slow", before]
    assert times["slow", slow] <= times["usual", slow]
    for order in orders.values():
        held = [peak_of_order(row, 1) for row in order.rows]
        assert max(held) <= limit


def test_with_nothing_unknown_the_rule_leaves_no_bubble_but_the_first_and_last():
    known = constant(4, 12, 0.01)
    assert simulated_by(adapted(known, 12), 12, known) == pytest.approx(0.01 * (3 * 12 + 3))


def test_balancing_shares_out_the_same_documents():
    come = as_they_come(LMSYS, WINDOWS[0], random.Random(1))
    assert len(come) == 32
    assert all(WINDOWS[0] - 1 < sum(window) <= WINDOWS[0] for window in come)
    evened = evenly(come)
    assert sorted(chain.from_iterable(evened)) == sorted(chain.from_iterable(come))
    heaviest = [max(sum(map(work, batch)) for batch in batches) for batches in (come, evened)]
    assert heaviest[1] < heaviest[0]
    step = step_of(evened, 1)
    assert sum(step.known.forward[0]) / 32 == pytest.approx(FORWARD_SECONDS)
    assert sum(step.known.activation_bytes[0]) / 32 == pytest.approx(ACTIVATION_BYTES)


needs_torch = pytest.mark.skipif(
    not (common.ENVIRONMENT / ".installed").exists(), reason="no PyTorch: `make rivals` sets it up"
)


@needs_torch
def test_orders_of_pytorch_are_those_of_the_same_name_here():
    names = {"1f1b": 1, "interleaved-1f1b": 2, "zb-v": 1, "dualpipe-v": 1}
    asked = {"workload": WORKLOAD.as_json_object(), "schedules": [*names], "steps": 1}
    for name, found in torch_finds("durations", asked).items():
        own = simulated(name, names[name])
        assert found["order"] == pytest.approx(own.makespan), name
        assert found["held"] == timed([own], WORKLOAD).held
        assert found["step"] >= found["order"]


@pytest.mark.slow(reason="6 s: three systems compile a step, made values as well")
@pytest.mark.parametrize("given", [True, False])
def test_first_steps_of_all_systems_are_of_one_model(given):
    losses = [step(Model(2, 2, given)) for step in SYSTEMS.values()]
    if given:
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert all(5 < loss < 6.5 for loss in losses)
