"""All rivals in one run: what they train is the same, and figures belong to one round."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.rivals import side_by_side
from benchmarks.rivals.calls import _stage, costs
from benchmarks.rivals.cases import CASES, Case, CaseModel, model_of
from benchmarks.rivals.living import Living
from benchmarks.rivals.one_process import SYSTEMS, one_f_one_b
from benchmarks.rivals.side_by_side import (
    BESIDE,
    COLUMNS,
    ROWS,
    TASKS,
    Cell,
    bytes_table,
    check_equal,
    ratios,
    steps_table,
    tasks_table,
    why_not,
)

CELLS = {
    "lengths-8": {BESIDE: Cell((0.1, 0.2, 0.4), 2**20), "spmd": Cell((0.2, 0.3, 0.4), 3 * 2**20)},
    "empty-8": {BESIDE: Cell((0.0064,), None), "set-mesh": Cell((0.0128,), None)},
}


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 8)])
def test_an_order_by_hand_is_1f1b(stages, microbatches):
    tasks = list(one_f_one_b(stages, microbatches))
    assert len(tasks) == len(set(tasks)) == 2 * stages * microbatches
    at = {task: i for i, task in enumerate(tasks)}
    for kind, stage, j in tasks:
        before = (kind, stage - 1, j) if kind == "F" else (kind, stage + 1, j)
        assert at.get(before, -1) < at[kind, stage, j]
    for stage in range(stages):
        held = most = 0
        for kind, own, _ in tasks:
            held += {"F": 1, "B": -1}[kind] * (own == stage)
            most = max(most, held)
        assert most == min(stages - stage, microbatches)


def test_cases_are_what_the_table_says():
    assert set(COLUMNS) == set(CASES)
    for name, case in CASES.items():
        assert name.endswith(f"-{case.microbatches}")
        assert name not in TASKS or TASKS[name] == 8 * case.microbatches
    model = model_of("lengths-8")
    assert {mb["tokens"].shape[1] for mb in model.batch} == {64, 128, 256}
    assert model.padded["tokens"].shape == (8, 2, 256)
    assert model.padded["mask"].sum() == model.weight == sum(mb["mask"].size for mb in model.batch)
    ours = {name for name, row in ROWS.items() if row.module == "one_process"}
    assert ours == set(SYSTEMS)


def test_ratios_are_of_one_round():
    assert ratios(CELLS["lengths-8"], "spmd") == [2.0, pytest.approx(1.5), 1.0]
    lines = steps_table(CELLS, {"jaxpp": "not run: no folder"}).splitlines()
    spmd = next(line for line in lines if "SPMD" in line)
    assert "| 300: 1.50 (1.00-2.00) (pads) | |" in spmd
    assert any("not run: no folder" in line for line in lines)
    assert "| 1 |" in bytes_table(CELLS)
    assert "| 200 |" in tasks_table(CELLS)
    assert not tasks_table({})


def test_a_call_needs_the_mesh_that_it_enters():
    with pytest.raises(RuntimeError, match="mesh"):
        jax.jit(partial(_stage, P("data")))([jnp.ones(8), jnp.ones(8)], jnp.ones((8, 8)))
    found = costs(1, 3)
    assert set(found) == {"entered", "named", "entering alone"}
    assert all(microseconds > 0 for microseconds in found.values())


@pytest.mark.parametrize("other", [{"losses": [5.0, 4.1]}, {"jax": "0.9"}])
def test_who_computes_something_else_is_refused(other):
    same = {"losses": [5.0, 4.0], "jax": "0.10"}
    check_equal("real-8", {BESIDE: same, "spmd": same | {"losses": [5.0001, 4.0]}})
    with pytest.raises(RuntimeError, match="spmd"):
        check_equal("real-8", {BESIDE: same, "spmd": same | other})


def test_what_is_missing_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(side_by_side, "SPECTRAX", tmp_path / ".venv-spectrax")
    assert "make rivals" in why_not("spectrax", "")
    assert "--jaxpp=FOLDER" in why_not("jaxpp", "")
    assert not why_not("jaxpp", "folder")
    assert not why_not("bf", "")


@pytest.mark.slow(reason="3 s: a process that imports JAX")
def test_a_process_that_ends_says_why():
    with (
        Living(sys.executable, "benchmarks.rivals.one_process", "none", "empty-8") as living,
        pytest.raises(RuntimeError, match="KeyError: 'none'"),
    ):
        living.answer()


@pytest.mark.slow(reason="40 s: eight systems compile; the benchmark compares their losses itself")
def test_all_systems_train_alike():
    model = CaseModel(4, 4, True, Case(8, 1, (8, 4, 16, 4)))
    losses = {}
    for name, system in SYSTEMS.items():
        own = system(model)
        losses[name] = [own.step() for _ in range(3)]
    for name, found in losses.items():
        assert found == pytest.approx(losses[BESIDE], rel=1e-5), name
    assert losses[BESIDE][2] < losses[BESIDE][0]
