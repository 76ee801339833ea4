"""Runs on paced devices: how long steps last."""

import dataclasses
import json

import pytest

import rrfp_jax as rrfp
from benchmarks.orders import write_csv
from benchmarks.paced_run import Pace, PacedRun
from rrfp_jax.core.hints import BF
from rrfp_jax.core.orders import GPipe
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.core.v_orders import ZBV
from rrfp_jax.runs.config import load_config
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal
from tests.train.test_processes import REPOSITORY, command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The files of a run on 3 paced stages, and what it printed."""
    folder = tmp_path_factory.mktemp("paced")
    workload = constant(3, 4, 0.02, transfer=0.005)
    (folder / "w.json").write_text(json.dumps(workload.as_json_object()))
    (folder / "gpipe.csv").write_text(write_csv(GPipe(), Placement(3), 4))
    status, said = command(
        *("rrfp_jax", "launch", "-n", 3, "-m", "benchmarks.paced_run"),
        f"--config={REPOSITORY}/configs/quickstart.py",
        "--workload=w.json",
        "--message-bytes=1000",
        "--config.schedule=csv:gpipe.csv",
        "--config.steps=3",
        folder=folder,
    )
    assert status == 0, said
    return folder / "runs" / "quickstart", said


class TestPacedDevices:
    @pytest.mark.slow(reason="9 s: a run of processes by the clock")
    def test_steps_last_as_long_as_the_workload_says(self, run):
        lines = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
        # Fill with forwards and backwards of the other two stages, 4 hops; then 4 tasks of 20 and 40 ms.
        ideal = (4 + 2) * 0.06 + 4 * 0.005
        assert [line["step"] for line in lines] == [0, 1, 2]
        # Never shorter, whatever the machine does; much longer only if pacing is broken.
        assert all(ideal <= line["step_seconds"] + 1e-3 <= 2 * ideal for line in lines), lines
        assert "loss" not in lines[0]

    @pytest.mark.slow(reason="8 s: three processes; test_paced_devices_follow_the_plan has one")
    def test_one_trace_tells_of_all_ranks(self, run):
        trace = json.loads((run[0] / "trace.json").read_text())
        assert 0 < trace["otherData"]["clock_precision_us"] < 20_000
        tasks = [event for event in trace["traceEvents"] if event.get("cat") == "task"]
        assert {event["tid"] for event in tasks} == {0, 1, 2}
        starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
        ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
        assert (
            starts.keys() == ends.keys() and len(starts) == 3 * 2 * 2 * 4
        )  # steps, hops, ways, microbatches
        assert all(abs(starts[i]["tid"] - ends[i]["tid"]) == 1 for i in starts)
        # A transfer lasts 5 ms: no task starts before its input has come.
        assert all(ends[i]["ts"] - starts[i]["ts"] >= 4_900 for i in starts)

    @pytest.mark.slow(reason="8 s: three processes; test_a_named_run_trains_and_validates has logs")
    def test_there_is_a_log_per_rank(self, run):
        folder, said = run
        assert sorted(path.name for path in folder.glob("rank-*.log")) == [f"rank-{r}.log" for r in range(3)]
        assert all(line.startswith("[0] ") for line in said.splitlines() if "step " in line)


@pytest.mark.slow(reason="a run of processes by the clock")
def test_a_v_on_paced_devices(tmp_path):
    """ZB-V with chunks on the same stage as neighbours: as long as simulated, or a little longer."""
    workload = constant(2, 6, 0.02, transfer=0.002)
    (tmp_path / "w.json").write_text(json.dumps(workload.as_json_object()))
    status, said = command(
        *("rrfp_jax", "launch", "-n", 2, "-m", "benchmarks.paced_run"),
        f"--config={REPOSITORY}/configs/quickstart.py",
        *("--workload=w.json", "--config.schedule=zb-v", "--config.steps=2"),
        folder=tmp_path,
    )
    assert status == 0, said
    placement = Placement(2, 2, "v")
    rules = StepRules(placement=placement, microbatches=6, schedule=ZBV())
    ideal = simulate(rules, WorkloadCosts(workload, placement)).makespan
    for line in (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines():
        assert ideal <= json.loads(line)["step_seconds"] + 1e-3 <= 2 * ideal


def test_paced_devices_follow_the_plan_for_their_workload(tmp_path):
    workload = log_normal(2, 6, forward=0.004, sigma=0.5, shared=0.9, seed=1)
    (tmp_path / "w.json").write_text(json.dumps(workload.as_json_object()))
    pace = Pace(workload=str(tmp_path / "w.json"), message_bytes=64)
    config = load_config(str(REPOSITORY / "configs" / "quickstart.py"))
    (report,) = PacedRun(dataclasses.replace(config, schedule="planned"), pace).steps(1)
    rules = StepRules(placement=Placement(2), microbatches=6, schedule=BF(), limit=4)
    found = Planned().plan(rules, WorkloadCosts(workload, Placement(2)))
    assert [report.trace.order(stage) for stage in range(2)] == list(map(list, found.order.rows))


def test_auto_on_paced_devices(tmp_path, capfd):
    """What the workload says is what there is to know."""
    (tmp_path / "w.json").write_text(json.dumps(constant(2, 4, 2e-3).as_json_object()))
    config = load_config(str(REPOSITORY / "configs" / "quickstart.py"))
    pace = Pace(workload=str(tmp_path / "w.json"))
    run = PacedRun(dataclasses.replace(config, schedule="auto", max_in_flight=2), pace)
    told = capfd.readouterr().out
    assert told.startswith("schedule auto: ranked:") and told.count("\n") == 1
    (report,) = run.steps(1)
    assert report.trace.placement.shape == "v"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"message_bytes": 0}, "message_bytes=0: a message has at least one byte"),
        ({"message_bytes": 2**31}, "give at most 1073741824 bytes"),
        ({"workload": "absent.json"}, "absent.json: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(rrfp.UsageError, match=said):
        Pace(**{"workload": "w.json", **given})
