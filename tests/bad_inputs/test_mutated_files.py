"""Every file that is read, changed a little: refused in a sentence, or read as what it says."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from msgspec import msgpack, to_builtins

import rrfp_jax as rrfp
from benchmarks.orders import write_csv
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, Placement, Task
from rrfp_jax.json_files import Unreadable
from rrfp_jax.report.look import LATEST_BYTES, read_latest
from rrfp_jax.report.store import LATEST, read_lines, read_steps, write_steps
from rrfp_jax.report.watch import BLOCKS, Window, frame
from rrfp_jax.runtime.run import recorder as flight_recorder
from rrfp_jax.runtime.run.exits import ExitReport
from rrfp_jax.runtime.run.exits import read_all as read_last_words
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import CostTable, WorkloadCosts, log_normal
from rrfp_jax.trace.records import Part, RecordedStep
from rrfp_jax.train.named import read_costs, schedule_of
from tests.bad_inputs.namespace import read_workload
from tests.support.mutations import changed_bytes, changed_trees
from tests.support.watched import latest, seen, step_of, told

EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)
STEP = log_normal(2, 3, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001)
COSTS = CostTable({name: log_normal(2, 1, forward=1.0, sigma=0, shared=0, seed=0) for name in ("a", "b")})
WORDS = ExitReport(
    rank=1,
    stages="stage 1",
    kind="peer lost",
    sentence="rank 2 was lost",
    culprit=2,
    time=1.5,
)
TRANSFERS = ("transfer_forward", "transfer_backward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated")


def read(read, path, *errors):
    """What is read; None if it is refused, in a sentence that names the file."""
    try:
        return read()
    except errors as error:
        assert str(path) in str(error) and str(error).isprintable() and len(str(error)) < 1500, error
        return None


def same_json(one, other):
    """Equal as JSON; whole numbers may have become fractions."""
    return json.loads(json.dumps(one), parse_int=float) == json.loads(json.dumps(other), parse_int=float)


def as_it_says(workload, tree):
    """Whether a workload is that of a file; transfers may be left out, or lack the last row."""
    plain = workload.as_json_object()
    left_out = {name: plain[name] for name in TRANSFERS if name not in tree}
    if len(tree.get("transfer_forward", ())) == workload.stages - 1:
        left_out["transfer_forward"] = [*tree["transfer_forward"], [0.0] * workload.microbatches]
    zeros = [rows[-1:] if name in tree else rows for name, rows in left_out.items()]
    assert not any(time for rows in zeros for row in rows for time in row)
    return same_json(plain, tree | left_out)


class TestWorkloads:
    @EXAMPLES
    @given(tree=changed_trees(STEP.as_json_object()))
    def test_trees(self, folder, tree):
        path = folder / "w.json"
        path.write_text(json.dumps(tree))
        found = read(partial(read_workload, path), path, rrfp.UsageError)
        assert found is None or as_it_says(found, tree)

    @EXAMPLES
    @given(content=changed_bytes(json.dumps(STEP.as_json_object()).encode()))
    def test_bytes(self, folder, content):
        path = folder / "w.json"
        path.write_bytes(content)
        found = read(partial(read_workload, path), path, rrfp.UsageError)
        assert found is None or as_it_says(found, json.loads(content))


class TestCosts:
    @EXAMPLES
    @given(tree=changed_trees(COSTS.as_json_object()))
    def test_trees(self, folder, tree):
        path = folder / "c.json"
        path.write_text(json.dumps(tree))
        found = read(partial(read_costs, path, str(path)), path, rrfp.UsageError)
        if found is not None:
            assert found.buckets.keys() == tree.keys()
            assert all(as_it_says(found.buckets[name], tree[name]) for name in tree)


def step_bytes():
    """Of a file that a run has written."""
    with TemporaryDirectory() as folder:
        latest(Path(folder), told(step_of(3, microbatches=2), replicas=2))
        return (Path(folder) / LATEST).read_bytes()


def step_tree():
    """What it says, without its records."""
    tree = msgpack.decode(step_bytes())
    del tree["run"][0]["records"]
    return tree


LINE = {"step": 3, "step_seconds": 0.5, "wall_seconds": 0.6, "loss": 2.0, "schedule": "bf", "skipped": 0}
LINE |= {"peak_bytes": [1, 2], "budget_bytes": [3, None], "hyperparams": {"learning_rate": 0.5}}


def cells(text):
    return [[cell.strip() for cell in row.split(",") if cell.strip()] for row in text.splitlines()]


@EXAMPLES
@given(content=changed_bytes(write_csv(by_name("zb-h1"), Placement(3), 4).encode()))
def test_orders(folder, content):
    path = folder / "order.csv"
    path.write_bytes(content)
    found = read(partial(schedule_of, f"csv:{path}"), path, rrfp.UsageError)
    if found is not None:
        written = write_csv(found, found.placement, found.microbatches)
        plain = content.decode().replace('"', "").replace("\r", "\n")
        assert [row for row in cells(written) if row] == [row for row in cells(plain) if row]


def a_trace():
    rules = StepRules(placement=by_name("zb-v").placement_for(2), microbatches=3, schedule=by_name("zb-v"))
    trace = simulate(rules, WorkloadCosts(STEP, rules.placement))
    return RecordedStep(trace=trace, rules=rules, buckets=["", "", ""])


def with_records(tree, records):
    """A file of changed steps, with the records that they had; no example if MessagePack cannot say it."""
    for steps in tree.values() if isinstance(tree, dict) else ():
        for step in steps if isinstance(steps, list) else ():
            if isinstance(step, dict):
                step.setdefault("records", records)
    try:
        return msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError):
        reject()


def a_tree():
    """What a file of steps says, and its records."""
    with TemporaryDirectory() as folder:
        write_steps(Path(folder) / "a", {"order": [a_trace()]})
        tree = msgpack.decode((Path(folder) / "a").read_bytes())
    return tree, tree["order"][0].pop("records")


@EXAMPLES
@given(tree=changed_trees(a_tree()[0]))
def test_steps(folder, tree):
    path = folder / "steps.msgpack"
    path.write_bytes(with_records(tree, a_tree()[1]))
    found = read(partial(read_steps, path), path, Unreadable)
    if found is None or not any(found.values()):
        return
    ((step,),) = (steps for steps in found.values() if steps)
    (stored,) = next(iter(filter(None, tree.values())))
    recorded, trace = step, step.trace
    assert (
        asdict(trace.placement) == {name: stored[name] for name in ("stages", "chunks", "shape")}
        and trace.records == a_trace().trace.records
    )
    assert (list(recorded.buckets), recorded.lead) == (stored["buckets"], stored["lead"])
    assert (recorded.rules.limit, recorded.grouped) == (stored["limit"], stored["grouped"])


@EXAMPLES
@given(records=changed_bytes(a_tree()[1]))
def test_records(folder, records):
    path, (tree, _) = folder / "steps.msgpack", a_tree()
    tree["order"][0]["records"] = records
    path.write_bytes(msgpack.encode(tree))
    found = read(partial(read_steps, path), path, Unreadable)
    if found is not None:
        ((step,),) = found.values()
        own = [record for part in step.trace.parts for record in part.records()]
        assert Part.of(own).packed == Part.of(Part(0.0, 0.0, {}, records).records()).packed


@EXAMPLES
@given(data=st.data())
def test_last_words(folder, data):
    WORDS.write(folder)
    path = folder / "last-words-1.json"
    tree = data.draw(changed_trees(json.loads(path.read_text())))
    path.write_text(json.dumps(tree))
    for words in read_last_words(folder).values():
        assert same_json(to_builtins(words), tree)


@EXAMPLES
@given(data=st.data())
def test_flight_recorders(folder, data):
    """Whatever a torn page holds, the launcher reads something of it."""
    recorder = flight_recorder.FlightRecorder(folder / "flight", 1, "stage 1")
    recorder.phase(flight_recorder.RunPhase("step", 3))
    for j in range(4):
        recorder.dispatched(3, 1, Task(FORWARD, 0, j))
    content = data.draw(changed_bytes((folder / "flight").read_bytes()[:700])).ljust(
        flight_recorder.SIZE, b"\0"
    )
    (folder / "other").write_bytes(content)
    found = read(partial(flight_recorder.read, folder / "other"), folder / "other", ValueError, OSError)
    assert found is None or isinstance(found.sentence(0.0), str)


@EXAMPLES
@given(data=st.data())
def test_metrics(folder, data):
    lines = [{"step": step, "loss": 1.5, "bubble": [0.1, 0.2]} for step in range(4)]
    path = folder / "metrics.jsonl"
    content = data.draw(changed_bytes("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    path.write_bytes(content)
    found, wrong = read_lines(path)
    assert wrong.isprintable()
    assert wrong or len(found) == content.count(b"\n")
    for step, line in found:
        assert line in content and json.loads(line)["step"] == step.step >= 0


def fits(seen, width=80):
    lines = frame(seen, Window(width, 24, BLOCKS))
    assert len(lines) <= 24 and max(line.cell_len for line in lines) <= width


class TestLatestSteps:
    """Whatever is in the numbers, there is a frame of it."""

    @EXAMPLES
    @given(content=changed_bytes(step_bytes()), width=st.sampled_from([40, 80, 200]))
    def test_bytes(self, folder, content, width):
        path = folder / "latest-step"
        path.write_bytes(content)
        found = read(partial(read_latest, path), path, Unreadable)
        assert found is None or fits(seen(found), width) is None

    @EXAMPLES
    @given(tree=changed_trees(step_tree()))
    def test_trees(self, folder, tree):
        path = folder / "latest-step"
        path.write_bytes(with_records(tree, msgpack.decode(step_bytes())["run"][0]["records"]))
        found = read(partial(read_latest, path), path, Unreadable)
        assert found is None or fits(seen(found)) is None


@EXAMPLES
@given(tree=changed_trees(LINE))
def test_latest_lines(folder, tree):
    path = folder / "metrics.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{json.dumps(tree)}\n")
    fits(seen(lines=[line for line, _ in read_lines(path, LATEST_BYTES)[0]]))
