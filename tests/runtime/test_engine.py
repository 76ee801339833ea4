"""The engine around a step: garbage collection, injected delays, and what is told while programs compile."""

import gc
import itertools
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from benchmarks.paced_queue import paced
from rrfp_jax.core.hints import BF
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.garbage import no_collections
from rrfp_jax.progress import Doing
from rrfp_jax.runtime.engine import loop as driver
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.loop import EVERY, FIRST, collect_together
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.mesh import topology
from rrfp_jax.runtime.programs.compiler import counting
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import ModelStep
from rrfp_jax.runtime.transport.protocol import Arrival, Key
from rrfp_jax.trace.costs import TableCosts, WorkloadCosts, constant
from tests.support import refusals, toy
from tests.verification.exploration.keys import key_of


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was_afterwards(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="of a task"), no_collections():
            assert not gc.isenabled()
            raise ValueError("of a task")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_no_task_is_stopped_for_it(monkeypatch):
    seen, fails, run = [], [], ModelStep.run

    def watched(*args):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("of a task")
        return run(*args)

    monkeypatch.setattr(ModelStep, "run", watched)
    trainer = toy.trainer()
    trainer.step(toy.microbatches(2))
    assert seen and not any(seen) and gc.isenabled()
    fails.append(True)
    with pytest.raises(TrainingError, match="of a task"):
        trainer.step(toy.microbatches(2))
    assert not any(seen) and gc.isenabled()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_collect_before_the_same_rounds(monkeypatch, ranks):
    collected, now = [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(now[-1]))
    for round in range(1, 2 * EVERY + 1):
        now.append(round)
        collect_together(round, ranks)
    assert collected == ([FIRST, EVERY + FIRST] if ranks > 1 else [])


def test_who_has_forbidden_collections_is_obeyed(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    gc.disable()
    try:
        collect_together(FIRST, 2)
    finally:
        gc.enable()


@pytest.mark.slow(reason="a Trainer of its own")
def test_steps_are_counted_however_rounds_are(monkeypatch):
    """Processes that share a stage, and transports, take numbers of rounds, too."""
    counted, usual = [], World.next_round
    monkeypatch.setattr(driver, "collect_together", lambda round, ranks: counted.append(round))
    monkeypatch.setattr(World, "next_round", lambda world: usual(world) + usual(world))
    trainer = toy.trainer()
    for _ in range(3):
        trainer.step(toy.microbatches(2))
    assert counted == [1, 2, 3]


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_kept_report_keeps_no_trainer():
    trainer = toy.trainer()
    report = trainer.step(toy.microbatches(2))
    gone = weakref.ref(trainer._engine)
    del trainer
    gc.collect()
    assert gone() is None and report.recorded.work() is None and "step" in str(report)


@pytest.mark.slow(reason="2 s: a Trainer that compiles two shapes")
def test_durations_of_one_shape_are_none_of_another():
    trainer = toy.trainer(2)
    shapes = [
        [{name: array[:, :length] for name, array in mb.items()} for mb in toy.microbatches(2)]
        for length in (4, 6)
    ]
    for batch in shapes:
        trainer.step(batch)
    (queue, *_) = trainer._engine.driver._queues
    by_task = Counter(cost[:-1] for cost in queue._usual if cost[0] == "train")
    assert set(by_task.values()) == {2}


def test_a_question_of_another_thread_changes_nothing():
    """The watchdog asks what a stage waits for; what it finds is not remembered for the main thread."""
    rules = StepRules(placement=Placement(1), microbatches=2, schedule=BF())
    scheduler = StageScheduler(0, rules)
    key = key_of(scheduler)
    assert str(scheduler.awaited()) == "nothing: F0 can run"
    assert scheduler.view.cached is None and key_of(scheduler) == key


LATE = 0.3


def trainer(share_devices=False, **delays):
    """Two stages whose tasks take some 10 ms."""

    def layer(weight, carry, mb):
        x = mb["x"] if carry is None else carry
        for _ in range(8):
            x = jnp.tanh(x @ weight)
        return x

    layers = [rrfp.layer(layer, init=lambda key: jnp.eye(256), repeat=2)]
    pipe = rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss(x.sum(), weight=x.shape[0]))
    data = [{"x": np.full((256, 256), 0.1, np.float32)} for _ in range(4)]
    settings, mesh = rrfp.Settings(delays=Delays(**delays)), rrfp.Mesh(pp=2, share_devices=share_devices)
    return rrfp.Trainer(pipe, optax.sgd(1e-3), data=data, mesh=mesh, schedule="gpipe", settings=settings)


@pytest.fixture(scope="module")
def late():
    """The second step of a run in which every arrival is noticed late."""
    return list(trainer(late_readiness=LATE).steps(2))[1].trace


def test_what_was_injected_into_arrivals_is_told(late):
    for record in late.records:
        arrived = (record.stage, record.task.kind) in ((0, BACKWARD), (1, FORWARD))
        assert record.late == pytest.approx(LATE if arrived else 0.0) and record.delayed == 0.0


def waits(trace):
    """How long after its end each forward of stage 0 was noticed on stage 1."""
    sent = {r.task.microbatch: r.end for r in trace.stage_records(0) if r.task.kind == 0}
    noticed = {r.task.microbatch: r.ready for r in trace.stage_records(1) if r.task.kind == 0}
    return [noticed[j] - sent[j] for j in sent]


def test_arrivals_are_noticed_late(late):
    assert min(waits(late)) >= LATE


def test_links_take_longer_also_where_stages_share_a_device(monkeypatch):
    monkeypatch.setattr(topology, "_local_devices", lambda: jax.devices()[:1])
    (step,) = trainer(share_devices=True, link_delay=0.1).steps(1)
    assert min(waits(step.trace)) >= 0.1


def test_ends_are_noticed_in_time_while_arrivals_are_held(late):
    assert max(r.end - r.start for r in late.records) < LATE / 2


@pytest.mark.slow(reason="3 s: two Trainers; core/test_jitter.py has the draws")
def test_jitter_keeps_the_device_busy_and_changes_no_number():
    plain, jittered = trainer(), trainer(jitter="J3", seed=1)
    assert [r.loss for r in plain.steps(2)] == [r.loss for r in jittered.steps(2)]
    trace = next(iter(jittered.steps(1))).trace
    for stage in range(2):
        records = trace.stage_records(stage)
        assert all(b.start >= a.end for a, b in itertools.pairwise(records))
    delays = [record.delayed for record in trace.records if record.delayed]
    assert 0 < len(delays) < len(trace.records) and min(delays) > 0.011  # 0.5 x 1.5 x 15 ms at least
    assert all(record.computed > record.start for record in trace.records)


def test_a_paced_device_tells_what_of_a_task_was_injected():
    costs = WorkloadCosts(constant(2, 20, 0.001), Placement(2))
    tasks = [Running(0, 0, Task(FORWARD, 0, j), 0, None, None, 0.0, 0.0) for j in range(20)]
    with paced(Delays(jitter="J3", seed=1), costs)("device", lambda: None) as queue:
        for running in tasks:
            queue.submit(running)
        ended = queue.ended()  # all, since they are due in the past
    assert ended == tasks
    assert {running.delayed > 0 for running in tasks} == {True, False}
    for running in ended:
        own = costs.duration(0, running.task)
        assert running.end - running.start == pytest.approx(own + running.delayed)


def test_a_transfer_by_the_costs_is_not_injected():
    costs = TableCosts({}, {(0, Task(FORWARD, 0, 0)): 0.25})
    delays = Delays(late_readiness=1.0, link_delay=0.5, link_bandwidth=8.0).arrivals(Placement(2), costs)
    arrival = Arrival(Key(1, 1, Task(FORWARD, 0, 0).input), [jnp.zeros(4, jnp.uint8)], produced=10.0)
    assert delays._release(arrival, now=9.0) == (12.25, 2.0)
    assert delays._release(arrival, now=20.0) == (21.0, 1.0)  # the real transfer took longer than all else


@pytest.mark.parametrize("wrong", [{"jitter": "J4"}, {"link_delay": -1.0}, {"late_readiness": float("nan")}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(rrfp.UsageError, match=next(iter(wrong))):
        Delays(**wrong)


def told(jobs, ended):
    """What is told of kinds of segments, given by job."""
    found = []
    with counting(found.append, jobs, "kinds", itertools.count().__next__) as tell:
        for job in ended:
            tell(job)
    assert all((doing.what, doing.parts) == ("compiling", "kinds") for doing in found)
    return [(doing.done, doing.total, doing.detail) for doing in found]


A0, A1, B0, OTHER = ("a", 0, "kind"), ("a", 1, "kind"), ("b", 0, "kind"), ("a", 0, "other")


@pytest.mark.parametrize(
    ("jobs", "ended", "said"),
    [
        ([], [], []),
        ([A0], [A0], [(0, 1, ""), (1, 1, "")]),
        ([A0, A1], [A1, A0], [(0, 1, ""), (1, 1, "")]),
        ([A0, A1, OTHER], [A1, OTHER, A0], [(0, 2, ""), (1, 2, ""), (2, 2, "")]),
        (
            [A0, B0, OTHER],
            [A0, OTHER, B0],
            [
                *((0, 3, "bucket 1 of 2"), (1, 3, "bucket 1 of 2")),
                *((2, 3, "bucket 2 of 2"), (3, 3, "bucket 2 of 2")),
            ],
        ),
    ],
)
def test_counts(jobs, ended, said):
    assert told(jobs, ended) == said


def test_an_error_ends_it():
    found = []
    with pytest.raises(KeyError), counting(found.append, [A0, OTHER], "kinds", lambda: 0) as ended:
        ended(A0)
        raise KeyError
    assert [(doing.done, doing.total) for doing in found] == [(0, 2), (1, 2), (2, 2)]
    assert found[-1].detail == "", "not all were loaded"


@pytest.mark.parametrize(("compiled", "detail"), [(0, "all loaded"), (1, "")])
def test_programs_that_were_all_loaded_are_told_so(compiled, detail):
    found, compiles = [], itertools.count(step=compiled)
    with counting(found.append, [A0, OTHER], "kinds", lambda: next(compiles)) as ended:
        ended(A0)
        ended(OTHER)
    assert [doing.detail for doing in found] == ["", "", detail]


@pytest.mark.slow(reason="2 s; train/test_said.py has programs that are told")
def test_a_trainer_tells_of_programs_by_bucket_also_of_shapes_met_later():
    """Eight layers of three kinds."""
    found = []
    trainer = toy.trainer(2, data=refusals.BATCH)
    trainer._engine.library.progress = found.append
    trainer.start()
    first, last = found[0], found[-1]
    assert first == Doing("compiling", 0, 3, parts="kinds (8 layers)") and last.done == last.total
    assert sorted({doing.done for doing in found}) == list(range(last.total + 1))
    del found[:]
    trainer.step([{name: array[:1] for name, array in one.items()} for one in refusals.BATCH])
    assert found[0].done == 0 and found[-1].done == found[-1].total > 0


def test_threads_live_as_long_as_the_trainer():
    trainer = toy.trainer(2)
    trainer.start()
    queues = trainer._engine.driver._queues
    found = []
    while sum(map(bool, found)) < 3:  # what ends within a look is not watched
        assert len(found) < 100, "no device is ever watched"
        trainer.step(toy.microbatches(8))
        found.append({queue._thread for queue in queues} - {None})
    started = set().union(*found)
    assert len(started) <= len(queues), "none is started again"
    del trainer, queues, found
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
