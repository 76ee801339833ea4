"""`rrfp sim` and `rrfp.simulate`: what they print and write, and what they refuse before they begin."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rrfp_jax as rrfp
from rrfp_jax.commands.simulation import Comparison
from rrfp_jax.core.schedules import NAMED, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.report.store import write_steps
from rrfp_jax.sim.choice import CANDIDATES
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal, measured
from rrfp_jax.trace.records import RecordedStep
from tests.support.commands import sim as main

ROOT = Path(__file__).parents[2]
STEP = log_normal(3, 6, forward=0.01, sigma=0.4, shared=0.5, seed=1, transfer=0.001)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a workload."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.json").write_text(json.dumps(STEP.as_json_object()))
    return tmp_path


def out(*arguments):
    assert main([*arguments, "--out=out.json"]) == 0
    with open("out.json", encoding="utf-8") as file:
        return json.load(file)


def test_by_hand(folder):
    """Two stages, two microbatches, F = 1, B = 2, transfers of a half: drawn on paper."""
    (folder / "two.json").write_text(json.dumps(constant(2, 2, 1.0, transfer=0.5).as_json_object()))
    found = out("--workload=two.json", "--schedule=1f1b")
    assert found["order"] == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    assert found["makespan"] == 10.0
    found = out("--workload=two.json", "--schedule=gpipe")
    assert found["order"][1] == ["F0", "F1", "B0", "B1"]
    assert found["makespan"] == 10.0
    found = out("--workload=two.json", "--schedule=bfw")
    assert found["order"][1] == ["F0", "I0", "F1", "I1", "W0", "W1"]
    assert found["makespan"] == 8.0


def test_a_runs_own_files(folder, capsys, monkeypatch):
    """What a run left is taken as it is: its trace with the steps as they ran, its costs bucket by bucket."""
    placed = by_name("bf").placement_for(3)
    own = StepRules(placement=placed, microbatches=6, schedule=by_name("bf"), limit=6)
    trace = simulate(own, WorkloadCosts(STEP, placed))
    run = [replace(ran(trace, own), trace=replace(trace, step=number)) for number in range(2)]
    write_steps(folder / "steps.msgpack", {"run": run})
    found = out("--workload=steps.msgpack", "--schedule=bf", "--schedule=1f1b", "--seeds=2")
    assert list(found) == ["as it ran", "bf", "1f1b"]
    assert found["as it ran"]["makespan"] == pytest.approx(found["bf"]["makespan"])
    assert found["as it ran"]["order"] == found["bf"]["order"]
    assert len(found["as it ran"]["makespans"]) == 2
    titles = [panel.title for panel in rrfp.simulate(folder, ["bf"]).timeline().panels]
    assert titles == ["as it ran, measured", "bf, simulated"]
    with monkeypatch.context() as patched:
        patched.setattr("rrfp_jax.report.timeline.MOST_ROWS", 5)
        patched.setattr("rrfp_jax.commands.sim.simulate", lambda *_, **__: pytest.fail("simulated"))
        assert main(["--workload=steps.msgpack", "--schedule=bf", "--plot=p.svg"]) == 2
    assert "6 rows of stages are too many" in capsys.readouterr().err
    os.makedirs("constant")  # a family, whatever is there
    for source, steps in (
        (str(folder), ["as it ran", "bf"]),
        (folder, ["as it ran", "bf"]),
        ("constant", ["bf"]),
    ):
        assert list(rrfp.simulate(source, ["bf"])) == steps
    assert list(rrfp.simulate(folder, ["bf"], jitter="J1")) == ["bf"]
    assert main(["--workload=steps.msgpack", "--seeds=3"]) == 2
    assert "it has 2 steps that trained; give --seeds=2 or less" in capsys.readouterr().err
    costs = measured(run)
    (folder / "costs.json").write_text(json.dumps(costs.as_json_object()))
    assert len(out("--workload=costs.json", "--schedule=bf", "--microbatches=7")["order"][0]) == 14


def ran(trace, own, budgets=None):
    return RecordedStep(trace=trace, rules=own, budgets=budgets, buckets=["short", "long"] * 3)


@pytest.mark.parametrize("limit", [2, None])
def test_a_trace_is_simulated_within_the_limits_of_its_run(folder, limit):
    """Two microbatches in flight; or none by number, and bytes for one to three."""
    placed = by_name("bf").placement_for(3)
    own = StepRules(placement=placed, microbatches=6, schedule=by_name("bf"), limit=limit)
    budgets = None if limit else [Budget([[10] * 6], room) for room in (30, 20, 10)]
    trace = simulate(own, WorkloadCosts(STEP, placed), budgets=budgets)
    write_steps(folder / "steps.msgpack", {"run": [ran(trace, own, budgets)]})
    found = out("--workload=steps.msgpack", "--schedule=bf")
    assert found["as it ran"]["order"] == found["bf"]["order"]
    assert found["bf"]["peak_in_flight"] == (limit or 3)
    chunked = out("--workload=steps.msgpack", "--schedule=bf", "--chunks=2")[
        "bf"
    ]  # half of a microbatch each
    assert chunked["peak_in_flight"] <= limit if limit else chunked["peak_bytes"] <= 30
    free = out("--workload=steps.msgpack", "--schedule=bf", "--limit=0")["bf"]
    assert free["peak_in_flight"] == 6 and free["makespan"] < found["bf"]["makespan"]


def test_a_runs_own_schedule_keeps_its_placement(folder):
    bf = by_name("bf")
    own = StepRules(placement=Placement(3, 2, "v"), microbatches=6, schedule=bf, limit=3)
    write_steps(
        folder / "steps.msgpack", {"run": [ran(simulate(own, WorkloadCosts(STEP, own.placement)), own)]}
    )
    found = rrfp.simulate(folder / "steps.msgpack", ["bf", "bfw"])
    assert [found[name].trace.placement.chunks for name in found] == [2, 2, 1]
    assert found["bf"].makespan == pytest.approx(found["as it ran"].makespan)
    assert rrfp.simulate(folder / "steps.msgpack", "bf", chunks=3)["bf"].trace.placement.chunks == 3


@pytest.mark.parametrize("kept", [{"accumulation": "arrival"}, {"spare_gradients": 0}])
def test_a_trace_is_simulated_with_the_gradients_kept_as_its_run_did(folder, kept):
    fb = by_name("fb")
    own = StepRules(placement=fb.placement_for(3), microbatches=6, schedule=fb, limit=3, **kept)
    trace = simulate(own, WorkloadCosts(STEP, own.placement))
    write_steps(folder / "steps.msgpack", {"run": [ran(trace, own)]})
    found = rrfp.simulate(folder / "steps.msgpack", "fb")
    assert found["fb"].recorded.rules == own
    other = rrfp.simulate(folder / "steps.msgpack", "fb", accumulation="index", spare_gradients=1)
    assert other["fb"].recorded.rules == replace(own, accumulation="index", spare_gradients=1)


def test_several_schedules_by_name(folder, capsys):
    names = ["1f1b", "bf", "bfw", "zb-v", "planned"]
    found = out("--workload=w.json", *(f"--schedule={name}" for name in names))
    assert list(found) == names
    for one in found.values():
        assert one["makespan"] >= one["lower_bounds"][0] * (1 - 1e-12)
        assert len(one["order"]) == 3
    assert "F0.1" in found["zb-v"]["order"][0]
    printed = capsys.readouterr().out
    assert all(f"\n {name} " in printed for name in names)
    assert f"{found['bf']['makespan']:.4f} s" in printed


def test_auto_says_what_it_chose(folder, capsys):
    found = out(
        "--family=log-normal", "--schedule=auto", "--schedule=1f1b", "--seeds=3", "--stages=3", "--limit=3"
    )
    chosen = found["auto"]["chosen"]
    assert len(chosen) == 3 and all(name in CANDIDATES for name in chosen)
    assert found["auto"]["makespan"] < found["1f1b"]["makespan"] and "chosen" not in found["1f1b"]
    printed = capsys.readouterr().out
    assert all(f"\n   {name}, {chosen.count(name)} x " in printed for name in set(chosen))
    alone = rrfp.simulate(STEP, rrfp.schedules.Auto(candidates=("bf", "bfw")))["auto"]
    assert alone.makespan == rrfp.simulate(STEP, alone.chosen[0])[alone.chosen[0]].makespan


def test_the_limit_counts_until_the_last_releasing_task(folder):
    for limit in (1, 2, 6):
        found = out("--workload=w.json", "--schedule=bfw", f"--limit={limit}")
        assert found["peak_in_flight"] == limit
        for order in found["order"]:
            held = 0
            for task in order:
                held += (task[0] == "F") - (task[0] in "BW")
                assert held <= limit
    assert out("--workload=w.json", "--schedule=bf", "--limit=0")["peak_in_flight"] == 6


def test_seeds_are_paired_and_median(folder):
    found = out("--family=log-normal", "--schedule=bf", "--seeds=3", "--stages=3", "--microbatches=6")
    assert len(found["makespans"]) == 3 and found["makespan"] == sorted(found["makespans"])[1]
    again = out("--family=log-normal", "--schedule=bf", "--seeds=2", "--stages=3", "--microbatches=6")
    assert again["makespans"] == found["makespans"][:2]
    jittered = out("--workload=w.json", "--schedule=bf", "--seeds=2", "--jitter=J3")
    assert jittered["makespans"][0] != jittered["makespans"][1]
    assert min(jittered["makespans"]) > out("--workload=w.json", "--schedule=bf")["makespan"]


def test_what_steps_waited_for_their_host_is_a_column_where_there_is_any():
    known = rrfp.simulate(STEP, ["bf"])
    assert "launch" not in str(known)
    for share, shown in ((0.0004, False), (0.031, True)):
        waited = replace(known["bf"], idle=[known["bf"].idle[0] | {"launch": share}])
        table = str(Comparison({"as it ran": waited} | known, known["bf"]))
        assert ("launch" in table, "3.1%" in table) == (shown, shown)


def test_a_limit_in_bytes(folder, capsys):
    held = ((100.0,) * 6,) * 3
    (folder / "bytes.json").write_text(json.dumps(replace(STEP, activation_bytes=held).as_json_object()))
    found = out("--workload=bytes.json", "--schedule=bf", "--byte-limit=250")
    assert (found["peak_in_flight"], found["peak_bytes"]) == (2, 200.0)
    assert main(["--workload=bytes.json", "--schedule=bf", "--byte-limit=99"]) == 2
    needed = "bf: byte_limit=99: a microbatch takes 100 bytes on a stage: give at least that"
    assert needed in capsys.readouterr().err
    assert out("--workload=w.json", "--schedule=bf")["peak_bytes"] is None


def test_an_order_from_a_file(folder):
    (folder / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,,1B0,1F1,1B1\n")
    (folder / "two.json").write_text(json.dumps(constant(2, 2, 1.0).as_json_object()))
    found = out("--workload=two.json", "--schedule=csv:order.csv")
    assert found["order"] == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]


def test_pictures_and_traces(folder):
    outputs = ["--plot=p.png", "--trace=t.json"]
    assert main(["--workload=w.json", "--schedule=bf", "--schedule=zb-v", *outputs]) == 0
    picture = (folder / "p.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">I", picture[16:20])[0] > 1000
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"bf", "zb-v"}
    tasks = [e for e in events if e.get("cat") == "task" and e["name"] != "idle"]
    assert len([e for e in tasks if e["pid"] == 0]) == 3 * 6 * 2
    assert len([e for e in tasks if e["pid"] == 1]) == 3 * 6 * 2 * 3
    assert main(["--workload=w.json", "--schedule=bf", "--plot=p.svg"]) == 0
    assert "<svg" in (folder / "p.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give one of --workload=FILE.json and --family=NAME"),
        (["--workload=w.json", "--family=constant"], "give one of"),
        (["--workload=absent.json"], "absent.json: cannot be read: No such file"),
        (["--workload=bad.json"], "bad.json: no workload: "),
        (["--family=steady"], "--family=steady: choose one of constant, "),
        (["--family="], "--family=: choose one of"),
        (["--family=w.json"], "--family=w.json: choose one of"),
        (["--workload=w.json", "--stages=3"], "--stages is for --family"),
        (["--workload=huge.json"], "the times are too large"),
        (["--family=constant", "--stages=0"], "stages=0: give a whole number, at least 1"),
        (
            ["--family=constant", "--stages=10000000"],
            "a simulated step has at most 1,000,000",
        ),
        (["--family=constant", "--seeds=10000000"], "seeds=10000000: give at most 10000"),
        (["--family=constant", f"--microbatches={10**30}"], "at most 1,000,000 forwards"),
        (["--family=constant", "--out=a\x1b.json"], "has the character '\\x1b', which cannot be printed"),
        (["--family=constant", "--seeds=0"], "seeds=0: give a whole number, at least 1"),
        (["--workload=w.json", "--schedule=fastest"], "or planned"),
        (["--workload=w.json", "--schedule=bf", "--limit=-1"], "limit=-1: give a whole number"),
        (["--workload=w.json", "--schedule=1f1b", "--byte-limit=-1"], "byte_limit=-1: give"),
        (["--workload=w.json", "--schedule=csv:absent.csv"], "csv:absent.csv: cannot be read"),
        (["--workload=w.json", "--schedule=ranked:csv:absent.csv"], "No such file or directory\n"),
        (["--workload=w.json", "--schedule=csv:w.json"], "csv:w.json: line 1, cell 1"),
        (["--workload=w.json", "--schedule=csv:stuck.csv"], "the order must deadlock: stage 0 waits for"),
        (
            ["--workload=w.json", "--schedule=interleaved-1f1b", "--chunks=0"],
            "chunks=0: give a whole number, at least 1",
        ),
        (["--workload=w.json", "--jitter=J9"], "--jitter=J9: choose one of J0, J1"),
        (["--workload=w.json", "--byte-limit=5"], "no activation_bytes"),
        (["--workload=w.json", "--plot=p.gif"], "p.gif: a picture's name ends with .png"),
        (["--workload=w.json", "--out=nowhere/o.json"], "there is no folder nowhere"),
        (["--workload=w.json", "--trace=."], ".: is a folder"),
        (
            ["--workload=w.json", "--out=r.json", "--trace=r.json"],
            "--trace=r.json: is the file of --out",
        ),
        (["--family=constant", "--stages=300", "--plot=p.png"], "600 rows of stages are too many"),
        (["--workload=w.json", "--limit=many"], "--limit=many: give a whole number"),
    ],
)
def test_refusals_are_one_line(folder, arguments, reason, capsys):
    (folder / "bad.json").write_text("{")
    huge = STEP.as_json_object() | {"forward": [[1e308] * 6] * 3}
    (folder / "huge.json").write_text(json.dumps(huge))
    cells = [f"{v}F{j},{v}B{j}" for v in range(3) for j in range(6)]
    rows = [",".join(cells[6 * v : 6 * v + 6]) for v in range(3)]
    backwards = ",".join(reversed(cells[6:12]))
    (folder / "stuck.csv").write_text("\n".join([rows[0], backwards, rows[2]]))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("rrfp sim: ") and printed.err.count("\n") == 1
    assert reason in printed.err


def test_help_names_every_schedule(capsys):
    assert main(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}" in told for name in [*NAMED, "ranked:ORDER", "auto", "planned", "csv:FILE"])


def test_a_reader_that_leaves_costs_nothing(folder):
    ours = f"{sys.executable} -m rrfp_jax sim --workload=w.json --out=o.json"
    command = f"{ours} | true; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert set(json.loads((folder / "o.json").read_text())) == {"1f1b", "bf"}


def test_a_step_that_takes_no_time(folder):
    (folder / "none.json").write_text(json.dumps(constant(2, 2, 0.0).as_json_object()))
    assert out("--workload=none.json", "--schedule=bf", "--plot=p.png")["makespan"] == 0.0


@pytest.mark.parametrize(
    ("workload", "schedules", "options", "reason"),
    [
        (None, ["bf"], {}, "NoneType"),
        (5, ["bf"], {}, "int"),
        ("constant", [], {}, "no schedules"),
        ("constant", ["bf"], {"limit": float("nan")}, "limit=nan"),
        ("constant", ["bf"], {"stages": 2.0}, "stages=2.0"),
        ("constant", ["bf"], {"seeds": "2"}, "seeds='2'"),
        ("constant", [3], {}, "schedule=3"),
    ],
)
def test_nonsense_from_a_notebook_is_refused(workload, schedules, options, reason):
    with pytest.raises(rrfp.UsageError, match=reason):
        rrfp.simulate(workload, schedules, **options)


def test_the_command_helps(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "--workload FILE.json" in printed and "interleaved-1f1b" in printed


def test_in_a_notebook(tmp_path):
    found = rrfp.simulate(STEP, ["1f1b", rrfp.schedules.BF()], limit=4)
    names = list(found)
    assert names == ["1f1b", "bf"] and found.speedup("1f1b") == 1.0
    assert str(found) in found._repr_html_()
    named = Comparison({"BF(<lambda>)": found["bf"]}, found["bf"])
    assert "BF(&lt;lambda&gt;)" in named._repr_html_()
    reached = replace(found["bf"], bounds=[found["bf"].makespan * (1 + 1e-15)])
    assert "-0.0%" not in str(Comparison({"bf": reached}, reached))
    found.timeline().save(tmp_path / "p.svg")
    same = rrfp.simulate(STEP.as_json_object(), "bf", limit=4)
    assert same["bf"].makespan == found["bf"].makespan
    with pytest.raises(rrfp.UsageError, match=r"^interleaved-1f1b: .* a multiple of 4, .* got 6"):
        rrfp.simulate("constant", ["interleaved-1f1b"], stages=4, microbatches=6)
