"""The Trainer as an object that is used, misused and used again."""

import copy
import dataclasses
import gc
import pickle
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.checkpoint import saving
from rrfp_jax.checkpoint.saving import _host_copy
from rrfp_jax.core.events import ROOM, Arrived, ScheduleError
from rrfp_jax.core.orders import GPipe
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.runtime import _jax
from rrfp_jax.runtime._jax import on_host
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.stages.stage import Stage, _is_finite
from rrfp_jax.runtime.stages.step import ModelStep
from rrfp_jax.train.exporting import _told
from rrfp_jax.train.report import REPORTED
from tests.support import toy
from tests.support.interleave import check_invariants


@pytest.fixture(scope="module")
def trainer():
    trainer = toy.trainer(2)
    trainer.start()
    return trainer


@pytest.mark.slow(reason="3 s: a Trainer of its own")
def test_initial_values_given_by_the_user_stay_the_users(trainer):
    given = jax.tree.map(jnp.copy, trainer.stage_params)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(given)
    }
    other = toy.trainer(2, init=lambda path, spec: leaves[path])
    list(other.steps(2))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(given))


def test_microbatches_may_come_from_a_generator(trainer):
    for _ in range(2):
        trainer.step(mb for mb in toy.microbatches())


def test_a_function_of_the_step_is_asked_once_per_step():
    asked = []

    def data(step):
        asked.append(step)
        return toy.microbatches(seed=step)

    trainer = toy.trainer(2, data=data)
    list(trainer.steps(2))
    trainer.evaluate(toy.microbatches())
    list(trainer.steps(1))
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: rrfp.Trainer(optax.sgd(0.1), toy.pipeline()), "first argument"),
        (lambda: rrfp.Trainer(toy.layers(), optax.sgd(0.1)), "is of type list, not rrfp.Pipeline"),
        (lambda: rrfp.Trainer(toy.pipeline(), mesh=4), "mesh is of type int"),
        (lambda: rrfp.Trainer(toy.pipeline(), split=3), "split=3"),
        (lambda: rrfp.Mesh(pp="4"), "pp='4'"),
        (lambda: rrfp.Trainer(toy.pipeline()).stage_params, "start"),
    ],
)
def test_wrong_arguments(build, said):
    with pytest.raises(rrfp.UsageError, match=said):
        build()


@pytest.mark.parametrize("name", ["weight", "loss", "step", "total", "validation_loss"])
def test_metrics_may_not_take_the_names_of_reports(name):
    def loss(logits, mb):
        total, weight = toy.sums(logits, mb)
        return rrfp.Loss(total, weight=weight, metrics={name: total})

    with pytest.raises(rrfp.UsageError, match=f"the loss: Loss metric '{name}'"):
        toy.trainer(2, pipe=toy.pipeline(loss))


def test_layers_know_whether_they_train():
    def layer(params, carry, mb):
        return params["w"] * mb["x"] * (2.0 if mb.training else 1.0)

    def loss(carry, mb):
        return rrfp.Loss(carry.sum(), weight=carry.shape[0])

    pipe = rrfp.Pipeline([rrfp.layer(layer, init=lambda key: {"w": jnp.ones(())})], loss)
    batch = [{"x": np.ones(2, np.float32)}]
    trainer = rrfp.Trainer(pipe, data=batch)
    assert trainer.value_and_grad(batch)[0] == 2.0
    assert trainer.evaluate(batch).loss == 1.0


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    def layer(params, carry, mb):
        return params["w"] * mb["x"]

    def loss(carry, mb):
        return rrfp.Loss(carry.astype(jnp.float32).sum(), weight=carry.shape[0])

    init = rrfp.layer(layer, init=lambda key: {"w": jnp.ones((), jnp.bfloat16)})
    trainer = rrfp.Trainer(rrfp.Pipeline([init], loss), mesh=rrfp.Mesh(pp=1))
    batch = [{"x": np.ones(1, jnp.bfloat16)} for _ in range(300)]  # 256 + 1 is 256 in bfloat16
    assert float(trainer.value_and_grad(batch)[1]["0"]["w"]) == 1.0


@pytest.mark.slow(reason="4 s: a Trainer of its own")
def test_the_check_accepts_bfloat16_parameters():
    def init(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), toy.head_init(key))

    pipe = rrfp.Pipeline([*toy.layers()[:-1], rrfp.layer(toy.head, init=init)], toy.loss)
    assert toy.trainer(2, pipe=pipe).check().ok


@pytest.mark.slow(reason="2 s: a Trainer; runtime/test_segments.py has a layer that prints")
def test_a_layer_may_print(capfd):
    def printing(params, carry, mb):
        jax.debug.print("seen {}", carry["x"].shape[0])
        jax.debug.print("seen {}", carry["x"][0, 0, 0])
        return toy.block(params, carry, mb)

    def init(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), toy.block_init(key))

    def casting(params, carry, mb):
        return printing(jax.tree.map(lambda leaf: jnp.sin(leaf.astype(jnp.float32)), params), carry, mb)

    layers = toy.layers()
    pipe = rrfp.Pipeline([layers[0], rrfp.layer(casting, init=init), *layers[1:]], toy.loss)
    trainer = toy.trainer(2, pipe=pipe, schedule="bfw")
    trainer.step(toy.microbatches(3))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 6


class Hanging:
    """A result that is not there for a long time."""

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds

    def is_ready(self):
        return time.monotonic() >= self.until

    def block_until_ready(self):
        time.sleep(max(0.0, self.until - time.monotonic()))


@pytest.mark.slow(reason="it waits; make test keeps it for the mutant that it finds")
def test_a_program_that_hangs_does_not_hold_its_error_back(trainer, monkeypatch):
    run, first = ModelStep.run, iter([Hanging(8)])

    def hanging(self, *task):
        outputs, token = run(self, *task)
        return outputs, next(first, token)

    monkeypatch.setattr(trainer._engine.driver, "_stall_seconds", 0.5)
    monkeypatch.setattr(ModelStep, "run", hanging)
    began, known = time.monotonic(), set(threading.enumerate())
    with pytest.raises(rrfp.TrainingError, match=r"nothing moved.*running: F0"):
        trainer.step(toy.microbatches())
    assert time.monotonic() - began < 7
    for thread in set(threading.enumerate()) - known:  # other tests count the driver's threads
        if thread.name.startswith("rrfp"):
            thread.join(20)


def test_a_dispatch_that_fails_is_named(trainer, monkeypatch):
    def fails(self, task, in_turn):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(ModelStep, "run", fails)
    with pytest.raises(rrfp.TrainingError, match="F0 on stage 0 failed: RESOURCE_EXHAUSTED"):
        trainer.step(toy.microbatches())


@dataclass(frozen=True)
class Wayward(rrfp.schedules.Hint):
    """Chooses what it should not."""

    choice: object

    def choose(self, state, ready):
        return self.choice and (self.choice, state)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (None, "chose nothing.*while F0 can run"),
        (rrfp.schedules.Task(rrfp.schedules.FORWARD, 0, 2), "chose F2"),
    ],
)
def test_a_hint_that_breaks_its_contract(choice, said):
    placement = rrfp.schedules.Placement(2)
    scheduler = StageScheduler(1, StepRules(placement=placement, microbatches=3, schedule=Wayward(choice)))
    scheduler.handle(Arrived(rrfp.schedules.Task(rrfp.schedules.FORWARD, 0, 0).input))
    with pytest.raises(ScheduleError, match=said):
        scheduler.handle(ROOM)
    check_invariants(scheduler)


def test_a_fixed_order_that_lacks_a_task_is_refused_at_once():
    class Lossy(GPipe):
        def order(self, stage, placement, microbatches):
            return super().order(stage, placement, microbatches)[:-1]

    with pytest.raises(rrfp.UsageError, match="schedule Lossy, stage 0: B4 is missing"):
        toy.trainer(2, schedule=Lossy())


def test_no_metric_can_take_the_place_of_a_reports_own_figures():
    report = toy.trainer(1).step(toy.microbatches(1))
    limited = dataclasses.replace(report, budget_bytes=[1])
    assert set(limited.as_dict()) - set(report.metrics) <= REPORTED


class TestWhatIsLeftOfAStep:
    """Its data, and what was prepared from weights: nothing, and no garbage collection is needed for that."""

    @pytest.fixture
    def parts(self, monkeypatch):
        """What each step has held, as weak references."""
        found, make = [], ModelStep.__init__

        def noted(self, *arguments):
            make(self, *arguments)
            found.append(weakref.ref(self))

        monkeypatch.setattr(ModelStep, "__init__", noted)
        gc.collect()
        gc.disable()
        yield found
        gc.enable()

    def test_when_it_has_ended(self, trainer, parts):
        trainer.step(toy.microbatches())
        trainer.evaluate(toy.microbatches())
        assert len(parts) == 4 and not any(part() for part in parts)

    def test_when_it_was_broken_off(self, trainer, parts, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(Stage, "put_sums", interrupted)  # those that there were have been given away
            trainer.step(toy.microbatches())
        assert len(parts) == 2 and not any(part() for part in parts)
        assert not any(queue.running for queue in trainer._engine.driver._queues)
        assert trainer.step(toy.microbatches()).applied


@pytest.mark.slow(reason="runtime/test_engine.py has threads of one")
def test_a_trainer_that_is_gone_has_closed_what_connected_it(monkeypatch):
    closed = []
    monkeypatch.setattr(Driver, "close", lambda driver: closed.append(weakref.ref(driver)))
    trainer = toy.trainer(2)
    trainer.start()
    engine = weakref.ref(trainer._engine)
    del trainer
    gc.collect()
    assert engine() is None
    assert len(closed) == 1 and closed[0]() is None


def test_what_devices_hold_goes_with_its_trainer():
    """As where a notebook's cell runs again: before garbage is collected there would be two of everything."""
    trainer = toy.trainer(2)
    trainer.step(toy.microbatches())
    stages = [weakref.ref(stage) for stage in trainer._engine.stages.values()]
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert [stage() for stage in stages] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", ["bf", "auto"])
def test_a_users_own_mesh_does_not_disturb_stages(schedule):
    alone = [report.loss for report in toy.trainer(2, data=toy.microbatches()).steps(2)]
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        trainer = toy.trainer(2, data=toy.microbatches(), schedule=schedule)
        reports = list(trainer.steps(2))
        assert [report.loss for report in reports] == alone and reports[-1].recorded.work() is not None
        trainer.evaluate(toy.microbatches(2))


@pytest.mark.parametrize("data", [None, toy.microbatches()])
def test_a_hint_by_an_order_that_the_placement_does_not_take_is_refused(data):
    with pytest.raises(rrfp.UsageError, match="ZB-V is defined for the v placement, got looped"):
        toy.trainer(mesh=rrfp.Mesh(pp=2, chunks=2), schedule="ranked:zb-v", data=data).step(
            toy.microbatches()
        )


MESHES = {
    "stages": (rrfp.Mesh(pp=2), toy.pipeline),
    "chunks": (rrfp.Mesh(pp=2, chunks=2), toy.pipeline),
    "replicas": (rrfp.Mesh(pp=2, dp=2), toy.pipeline),
    "tied": (rrfp.Mesh(pp=2), toy.tied_pipeline),
}


@pytest.mark.slow(reason="a Trainer for each mesh")
@pytest.mark.parametrize("case", MESHES)
def test_transfers_that_nobody_asked_for_may_be_disallowed(case, tmp_path):
    mesh, pipe = MESHES[case]

    def losses():
        trainer = toy.trainer(mesh=mesh, pipe=pipe(), data=lambda step: toy.microbatches(4, seed=step))
        found = [report.loss for report in trainer.steps(2)]
        trainer.save(tmp_path / str(jax.config.jax_transfer_guard))
        trainer.restore(tmp_path / str(jax.config.jax_transfer_guard))
        gradient = trainer.value_and_grad(toy.microbatches(4))[1]
        trainer.check(), trainer.params()
        with jax.transfer_guard("allow"):
            norm = float(optax.tree.norm(jax.device_get(gradient)))
        return [*found, trainer.evaluate(toy.microbatches(4)).loss, norm]

    expected = losses()
    with jax.transfer_guard("disallow"):
        assert losses() == expected


def test_what_is_kept_and_restored_is_read_back_whatever_guard_there_is(tmp_path, monkeypatch):
    """In threads, too. On a CPU it is there already, and JAX enforces nothing."""
    guards = set()

    def noted(inner, own):
        guards.add(jax.config.jax_transfer_guard_device_to_host)
        return inner(own)

    for owner, name in ((_jax, "fetch"), (saving, "fetch"), (type(jnp.ones(1)), "tolist")):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda own, inner=inner: noted(inner, own))
    optimizer = optax.inject_hyperparams(optax.adam)(0.01)
    trainer = toy.trainer(2, optimizer=optimizer, data=toy.microbatches(4))
    list(trainer.steps(1))
    trainer.save(tmp_path)
    trainer.restore(tmp_path)
    assert guards == {"allow"}


def test_results_come_under_a_guard_also_where_they_must_be_copied():
    """Floats on a CPU are not: they are there already."""
    made = lambda: jax.device_put(np.zeros(3, np.int8), jax.devices()[0]).astype(jnp.int4)  # noqa: E731
    results = {"norm": jnp.arange(3, dtype=jnp.int4), "losses": [jnp.arange(2.0)]}
    with jax.transfer_guard("disallow"):
        found = on_host(results)
        assert _is_finite(made()) and len(_told({(): made()}, ())) == 1
        assert _host_copy(made(), {(0,): made()}).nbytes == 3
        with pytest.raises(RuntimeError, match="Disallowed device-to-host transfer"):
            np.asarray(made())
    assert found["norm"].tolist() == [0, 1, 2] and found["losses"][0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (jax.disable_jit, r"jax_disable_jit=True: .*compiled before they run.*JAX_DISABLE_JIT"),
        (
            lambda: jax.transfer_guard("disallow_explicit"),
            "jax_transfer_guard='disallow_explicit'.*use 'disa",
        ),
        (
            lambda: jax.transfer_guard_host_to_device("disallow_explicit"),
            "jax_transfer_guard_host_to_device='disallow_explicit'",
        ),
    ],
)
def test_what_no_stage_could_run_under_is_refused_at_the_start(guard, said):
    with guard(), pytest.raises(rrfp.UsageError, match=said):
        toy.trainer(2)


CALLS = {
    "step": lambda trainer: trainer.step(toy.microbatches(3)),
    "value_and_grad": lambda trainer: trainer.value_and_grad(toy.microbatches(3)),
    "evaluate": lambda trainer: trainer.evaluate(lambda step: toy.microbatches(3)),
    "steps": lambda trainer: next(trainer.steps(1)),
    "save": lambda trainer: trainer.save("nowhere"),
    "restore": lambda trainer: trainer.restore("nowhere"),
    "params": lambda trainer: trainer.params(),
    "split": lambda trainer: setattr(trainer, "split", [4, 4]),
    "schedule": lambda trainer: setattr(trainer, "schedule", "1f1b"),
}


def in_thread(act, name):
    """What it returned or raised there."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60.0)
    return found[0]


@pytest.fixture(scope="module")
def twins():
    """Two that are alike, one of which nobody disturbs."""
    return toy.trainer(2), toy.trainer(2)


@pytest.mark.parametrize("method", CALLS)
def test_a_second_thread_is_refused_by_name_and_the_trainer_stays_whole(twins, method):
    (trainer, undisturbed), refused = twins, []
    trainer._on_step = lambda report: refused.append(in_thread(lambda: CALLS[method](trainer), "the second"))
    in_thread(lambda: list(trainer.steps(2)), "the first")
    trainer._on_step = None
    for error in refused:
        assert isinstance(error, rrfp.UsageError)
        name = "step" if method == "steps" else method
        assert f"Trainer.{name} in thread 'the second' while Trainer.step in thread 'the first'" in str(error)
    list(undisturbed.steps(2))
    assert len(refused) == 2
    chex.assert_trees_all_equal(*(jax.device_get(t.stage_params) for t in (trainer, undisturbed)))


def test_the_same_thread_may_come_again(trainer):
    found = []
    trainer._on_step = lambda report: found.append(trainer.evaluate(lambda step: toy.microbatches(3)))
    list(trainer.steps(1))
    trainer._on_step = None
    assert len(found) == 1


COPIES = [copy.copy, copy.deepcopy, pickle.dumps, lambda trainer: copy.deepcopy({"kept": [trainer]})]


@pytest.mark.parametrize("copied", COPIES)
def test_copies_are_refused(trainer, copied):
    with pytest.raises(rrfp.UsageError, match="a Trainer cannot be copied or pickled, as its arrays"):
        copied(trainer)


class TwoWidths:
    """Data that declares the lengths 2 and 4, of which each step has one."""

    buckets = tuple({"x": jax.ShapeDtypeStruct((rows, 2), np.float32)} for rows in (2, 4))

    def plan(self, step):
        return [rrfp.Microbatch({"x": self.buckets[step % 2]["x"]}, {})]

    def load(self, microbatch, fields):
        return {"x": np.ones(microbatch.fields["x"].shape, np.float32)}


def of_three_rows():
    layers = [rrfp.layer(lambda p, x, mb: mb["x"] * p["w"], init=lambda key: {"w": jnp.ones(())})]
    pipe = rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss(x.sum(), weight=x.size))
    return rrfp.Trainer(pipe, optax.sgd(0.1), data=[{"x": np.ones((3, 2), np.float32)}])


def test_an_evaluation_starts_a_trainer_on_its_own_data():
    trainer = of_three_rows()
    trainer.evaluate([{"x": np.ones((4, 2), np.float32)}])
    (report,) = trainer.steps(1)
    assert report.compiled == 0


def test_an_evaluation_compiles_all_declared_buckets_at_once():
    trainer = of_three_rows()
    trainer.start()
    counted = [trainer._engine.executables.compiles]
    for steps in (1, 2):
        trainer.evaluate(TwoWidths(), steps=steps)
        counted.append(trainer._engine.executables.compiles)
    assert counted[0] < counted[1] == counted[2]
