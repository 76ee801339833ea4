"""Several processes, as users start them: parity, agreement, paced devices, one trace for all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rrfp_jax as rrfp
from tests.scripts import crossed_ranks, narrow_ranks
from tests.support import toy
from tests.support.selected import is_quick

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"


CASES = {"all": 11, "few": 2}  # of parity_ranks.py


def environment():
    """What commands of ours run in."""
    own = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    own["RRFP_TEST_EXECUTABLES"] = str(REPOSITORY / ".pytest_cache" / "executables")
    return {**os.environ, **own}


def command(*arguments, folder, limit=150.0):
    """Run a command of ours to its end; its status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


PROCESSES = [pytest.param(4, marks=pytest.mark.slow(reason="four processes; two have the same tests")), 2]


@pytest.fixture(scope="module", params=PROCESSES, ids="{}-processes".format)
def parity(request, tmp_path_factory):
    """What every rank found, of one launch that runs all cases of a world shape; `make test` takes a few."""
    folder = tmp_path_factory.mktemp("parity")
    count = request.param
    status, said = command(
        "rrfp_jax",
        "launch",
        "-n",
        count,
        SCRIPTS / "parity_ranks.py",
        folder,
        "few" if is_quick(request) else "all",
        folder=folder,
        limit=400.0,
    )
    assert status == 0, said
    return [json.loads((folder / f"parity-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def alone():
    """The losses of one process."""
    trainer = toy.trainer(1, clip_norm=0.3)
    return [report.loss for report in trainer.steps(5)]


@pytest.fixture(scope="module")
def tied_alone():
    """The trainer of one process, with a tied parameter, and its figures of each step."""
    trainer = toy.trainer(1, pipe=toy.tied_pipeline(), clip_norm=0.3)
    own = [next(trainer.steps(1)) for _ in range(2)]
    trainer._stepper.steps_done += 1  # the step that the processes skip
    own += trainer.steps(2)
    return trainer, [[r.loss, r.gradient_norm, r.parameter_norm] for r in own]


class TestParity:
    @pytest.mark.costly(reason="one launch of processes for all tests of the class")
    def test_every_schedule_and_split_agrees_with_plain_jax(self, request, parity):
        for rank in parity:
            assert len(rank["cases"]) == CASES["few" if is_quick(request) else "all"]
            for case in rank["cases"]:
                assert case["loss_error"] <= 1e-6 and case["leaf_error"] <= 1e-5, case

    def test_schedules_agree_to_the_bit(self, parity):
        assert all(case["bitwise"] for rank in parity for case in rank["cases"])

    def test_together_the_ranks_have_every_layer_once(self, parity):
        for number in range(len(parity[0]["cases"])):
            layers = [int(layer) for rank in parity for layer in rank["cases"][number]["layers"]]
            assert sorted(layers) == list(range(toy.BLOCKS + 2))

    def test_all_ranks_are_told_the_same(self, parity):
        for name in ("losses", "evaluated", "wrong"):
            assert len({json.dumps(rank[name]) for rank in parity}) == 1

    def test_training_is_that_of_one_process(self, parity, alone):
        """Also after layers have moved from one process to another."""
        np.testing.assert_allclose(parity[0]["losses"], alone, rtol=1e-5)

    def test_tied_parameters_and_skipped_steps_are_those_of_one_process(self, parity, tied_alone):
        trainer, expected = tied_alone
        tables = [table for rank in parity for table in rank["tied"]["tables"]]
        assert len(tables) == 2 and tables[0] == tables[1]
        np.testing.assert_allclose(tables[0], trainer.stage_params["0"]["table"], rtol=1e-4, atol=1e-5)
        for rank in parity:
            assert rank["tied"]["agrees"] and rank["tied"]["skipped"] == [2]
            np.testing.assert_allclose(rank["tied"]["steps"], expected, rtol=1e-5)

    def test_what_connected_trainers_that_are_gone_is_gone(self, parity):
        """Two are left, each with a channel for small messages and one for large ones, beside that of all."""
        assert [rank["channels"] for rank in parity] == [5] * len(parity)

    @pytest.mark.slow(reason="a Trainer of each rank; test_parity.py has a wrong gradient")
    def test_a_wrong_loss_would_be_caught(self, parity):
        assert parity[0]["wrong"] > 1e-3

    @pytest.mark.slow(reason="2 s of each rank; tied parameters are checked before the first step")
    def test_the_check_agrees_also_after_steps(self, parity):
        assert all(rank["checked"] for rank in parity)


@pytest.mark.costly(reason="a run of two processes")
def test_a_plan_that_differs_names_rank_and_step(tmp_path):
    script = tmp_path / "differs.py"
    script.write_text(
        "import os\n"
        "from tests.support import toy\n"
        "odd = os.environ['RRFP_RANK'] == '1'\n"
        "data = lambda step: toy.microbatches(6 if odd and step == 3 else 5, seed=step)\n"
        "for report in toy.trainer(2, data=data).steps(5): pass\n"
    )
    status, said = command("rrfp_jax", "launch", "-n", 2, script, folder=tmp_path)
    assert status == 1
    assert "rank 1" in said and "step 3" in said and "Traceback" not in said, said


@pytest.mark.slow(reason="3 s: processes; test_refusals.py has meshes")
def test_more_processes_than_the_mesh_divides_among(tmp_path):
    script = tmp_path / "two.py"
    script.write_text("from tests.support import toy\ntoy.trainer(3)\n")
    status, said = command("rrfp_jax", "launch", "-n", 2, script, folder=tmp_path)
    assert status == 2 and "Mesh(pp=3) on 2 processes" in said, said


SMALL_RUN = [
    f"--config={REPOSITORY}/configs/quickstart.py",
    *("--config.mesh.pp=2", "--config.model.n_layers=1", "--config.model.d_model=16"),
    *("--config.model.d_ff=16", "--config.batch=4", "--config.microbatches=2"),
]


@pytest.mark.costly(reason="a run of two processes")
def test_a_named_run_trains_and_validates(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 40)
    arguments = [*SMALL_RUN, "--config.steps=2", f"--config.path={tmp_path}/text.txt"]
    status, said = command("rrfp_jax", "launch", *arguments, folder=tmp_path)
    assert status == 0, said
    assert len(list((tmp_path / "runs/quickstart").glob("rank-*.log"))) == 2
    assert all(line.startswith("[0] ") for line in said.splitlines() if "step  " in line)
    lines = [
        json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1]["validation_loss"] > 0 and len(lines[1]["bubble"]) == 2
    assert json.loads((tmp_path / "runs/quickstart/config.json").read_text())["mesh"]["pp"] == 2
    (costs,) = json.loads((tmp_path / "runs/quickstart/costs.json").read_text()).values()
    assert len(costs["forward"]) == 2 and lines[0]["load_seconds"] >= 0
    assert "2 processes" in said and "validation loss" in said


def interrupted_at(line_with, *arguments, folder, limit=60):
    """Run a command of ours, press Ctrl-C at a line of what it prints; its status and what it printed."""
    with subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launched:
        said = []
        for line in launched.stdout:
            said.append(line)
            if line_with in line:
                launched.send_signal(signal.SIGINT)
        return launched.wait(limit), "".join(said)


@pytest.mark.slow(reason="12 s: two processes; commands/test_cli.py has one")
def test_ctrl_c_ends_a_run_with_its_files_complete(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 40)
    arguments = [*SMALL_RUN, "--config.steps=1000", f"--config.path={tmp_path}/text.txt"]
    status, said = interrupted_at("step     2", "rrfp_jax", "launch", *arguments, folder=tmp_path, limit=120)
    assert status == 130, said
    folder = tmp_path / "runs" / "quickstart"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 3 and json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "Traceback" not in said


@pytest.mark.slow(reason="10 s: two processes; launcher/test_slurm.py has the variables")
def test_the_tasks_of_a_slurm_step_find_each_other(tmp_path):
    """By the environment that srun sets: there is no SLURM here."""
    script = "from tests.support import toy\nprint([r.loss for r in toy.trainer(2).steps(2)])"
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            env=environment() | step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    try:
        said = [task.communicate(timeout=120)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0]
    losses = [json.loads(each.splitlines()[-1]) for each in said]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.slow(reason="6 s: two processes; in one, test_numbers.py")
def test_between_processes_too_and_numbers_of_few_bits_travel(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_TRANSFER_GUARD", "disallow")
    status, said = command(
        "rrfp_jax", "launch", "-n", 2, SCRIPTS / "narrow_ranks.py", folder=tmp_path, limit=100.0
    )
    assert status == 0, said
    narrow_ranks.main()
    between, alone = (_losses(text) for text in (said, capsys.readouterr().out))
    np.testing.assert_allclose(between, alone, rtol=1e-5)


@pytest.mark.slow(reason="10 s: two processes; runtime/test_groups.py knows where that matters")
def test_a_sum_over_replicas_waits_for_no_stage_that_waits_for_messages(monkeypatch, tmp_path):
    """Stage 2 is on rank 1, stage 1 on both: who waits in the sum of stage 1 may owe stage 0 its input."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    status, said = command(
        "rrfp_jax", "launch", "-n", 2, SCRIPTS / "crossed_ranks.py", folder=tmp_path, limit=100.0
    )
    assert status == 0, said
    alone = crossed_ranks.trainer(rrfp.Mesh(pp=1))
    np.testing.assert_allclose(_losses(said), [report.loss for report in alone.steps(2)], rtol=1e-5)


def _losses(said):
    return json.loads(next(line for line in said.splitlines() if "losses" in line).partition("losses ")[2])
