"""Data is loaded while the step before runs: the same arrays, errors where they belong, no thread left."""

import threading
import time

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.data.contract import InMemory, bucket_of
from rrfp_jax.runtime.run.waits import ForData
from rrfp_jax.runtime.run.world import World
from rrfp_jax.train.loading import Loader
from tests.support import toy
from tests.train.test_processes import command, interrupted_at


class Watched:
    """Notes who asks for what, and that nobody asks while another does; may wait, or fail at a step."""

    def __init__(self, seconds=0.0, fails_at=None, plan_fails_at=None):
        self.asked, self.seconds = [], seconds
        self.fails_at, self.plan_fails_at = fails_at, plan_fails_at
        self._data = InMemory(lambda step: toy.microbatches(3, seed=step))
        self._busy = threading.Lock()

    def plan(self, step):
        assert self._busy.acquire(blocking=False)
        self.asked.append(("plan", step, threading.current_thread() is threading.main_thread()))
        self._busy.release()
        if step == self.plan_fails_at:
            raise rrfp.UsageError(f"no step {step}")
        return self._data.plan(step)

    def load(self, microbatch, fields):
        assert self._busy.acquire(blocking=False)
        time.sleep(self.seconds)
        step, _ = microbatch.source
        self.asked.append(("load", step, threading.current_thread() is threading.main_thread()))
        self._busy.release()
        if step == self.fails_at:
            raise OSError(f"disk of step {step}")
        return self._data.load(microbatch, fields)


def loads(data):
    """By step, whether its loads were made on the main thread."""
    return {step: main for what, step, main in data.asked if what == "load"}


def loading_has_ended(trainer):
    ahead = trainer._stepper.loader._ahead
    return ahead is None or ahead.ended.wait(10)


@pytest.mark.slow(reason="3 s: a Trainer of its own")
def test_all_but_the_first_step_are_loaded_ahead_and_nothing_after_the_last():
    data, plain = Watched(), toy.trainer(2)
    expected = [plain.step(toy.microbatches(3, seed=step)).loss for step in range(4)]
    trainer = toy.trainer(2, data=data)
    trainer.start()
    data.asked.clear()
    losses = []
    for report in trainer.steps(4):
        losses.append(report.loss)
        trainer.evaluate(toy.microbatches())  # waits for nobody's data, changes nothing
        assert 0 <= report.load_seconds < report.wall_seconds
        assert report.as_dict()["load_seconds"] == report.load_seconds
    assert losses == expected
    assert loads(data) == {0: True, 1: False, 2: False, 3: False}
    counted = [(what, step) for what, step, _ in data.asked]
    assert all(counted.count(("plan", step)) == 1 for step in range(4))
    assert all(counted.count(("load", step)) == 3 for step in range(4))


def test_one_thread_lives_as_long_as_the_loader():
    def of_loader():
        return {thread for thread in threading.enumerate() if thread.name == "rrfp-load"} - others

    others = set(threading.enumerate())
    loader, data = Loader(lambda bucket, j: set(), World()), Watched()
    assert not of_loader()
    for step in range(3):
        loader.begin(data, step)
        loader.settle()
        (thread,) = of_loader()
    del loader
    thread.join(10)
    assert not thread.is_alive()


def test_the_time_that_a_step_waits_is_told():
    reports = list(toy.trainer(1, data=Watched(seconds=0.05)).steps(3))
    assert reports[0].load_seconds >= 0.15  # three microbatches, nothing was there
    slow = Watched(seconds=0.0)
    trainer = toy.trainer(1, data=slow)
    steps = trainer.steps(2)
    next(steps)
    time.sleep(0.2)
    slow.seconds = 1.0
    assert next(steps).load_seconds < 1.0  # it was there already


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"fails_at": 2}, rrfp.TrainingError, "step 2: the data's load.* raised OSError: disk of step 2"),
        ({"plan_fails_at": 2}, rrfp.UsageError, "no step 2"),
    ],
)
def test_an_error_belongs_to_the_step_that_needs_the_data(wrong, error, said):
    trainer = toy.trainer(2, data=Watched(**wrong))
    steps = trainer.steps(5)
    assert [next(steps).step for _ in range(2)] == [0, 1]
    with pytest.raises(error, match=said) as raised:
        next(steps)
    cause = raised.value.__cause__ or raised.value
    assert cause.__context__ is None and trainer.steps_done == 2  # nothing of what failed ahead
    assert loading_has_ended(trainer)
    trainer.step(toy.microbatches(3, seed=2))  # by hand, it goes on
    assert next(trainer.steps(1)).step == 3


@pytest.mark.slow(reason="5 s: two Trainers")
def test_what_was_loaded_is_not_taken_for_another_step(tmp_path):
    def run():
        return toy.trainer(2, data=Watched())

    whole = [report.loss for report in run().steps(5)]
    trainer, losses = run(), []
    for report in trainer.steps(5):
        losses.append(report.loss)
        if report.step == 2:
            trainer.save(tmp_path)
            break  # step 3 has been loaded
    again = run()
    assert again.restore(tmp_path)
    assert [report.loss for report in again.steps(2)] == whole[3:]
    trainer.restore(tmp_path)
    assert losses + [report.loss for report in trainer.steps(2)] == whole


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    loader, data = Loader(lambda bucket, j: set(), World()), Watched()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            loader.begin(data, 1)
    loader.settle()
    loader.begin(data, 1)
    assert loader.plan(data, 1) and loads(data) == {}


def test_only_fields_that_are_read_are_loaded_and_others_when_asked_for():
    asked = []

    class Data(InMemory):
        def load(self, microbatch, fields):
            asked.append(set(fields))
            return super().load(microbatch, fields)

    data = Data(lambda step: toy.microbatches(2, seed=step))
    first = bucket_of(data.plan(1)[0].fields)
    loader = Loader(lambda bucket, j: {"tokens"} if bucket == first else set(), World())
    loader.begin(data, 1)
    plan = loader.plan(data, 1)
    assert asked == [{"tokens"}] * 2
    found = loader.load(data, 1, plan, [frozenset(["tokens"]), frozenset(["tokens", "mask"])])
    assert asked[2:] == [{"tokens", "mask"}]
    np.testing.assert_array_equal(found[1]["mask"], toy.microbatches(2, seed=1)[1]["mask"])
    assert loader.load(data, 2, loader.plan(data, 2), [frozenset()] * 2) == [{}, {}]


@pytest.mark.parametrize(
    ("asks", "named"), [("plan", r"plan\(2\)"), ("load", r"load\(\) of microbatch 0 of step 2")]
)
def test_waiting_for_data_that_hangs_has_a_limit_and_a_name(asks, named):
    comes = threading.Event()

    class Hanging(Watched):
        def plan(self, step):
            assert asks == "load" or step < 2 or comes.wait(60)
            return super().plan(step)

        def load(self, microbatch, fields):
            assert asks == "plan" or microbatch.source[0] < 2 or comes.wait(60)
            return super().load(microbatch, fields)

    data = Hanging()
    trainer = toy.trainer(2, data=data, stall_seconds=1.0)
    steps = trainer.steps(3)
    assert [next(steps).step for _ in range(2)] == [0, 1]
    for again in (steps, trainer.steps(1)):  # it is not called by two threads
        with pytest.raises(rrfp.TrainingError, match=rf"waiting for the data's {named}, since .*, now 1$"):
            next(again)
    assert trainer.steps_done == 2
    assert isinstance(trainer._world.waits.awaited()[0], ForData)  # for last words
    comes.set()
    assert next(trainer.steps(1)).step == 2
    assert loads(data)[2] is False and data.asked.count(("plan", 2, False)) == 1
    assert loading_has_ended(trainer)


@pytest.mark.slow(reason="a run of processes that hangs")
def test_a_rank_whose_data_hangs_on_the_main_thread_says_so_at_its_end(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, time\n"
        "from rrfp_jax.data.contract import InMemory\n"
        "from tests.support import toy\n"
        "class Hanging(InMemory):\n"
        "    def load(self, microbatch, fields):\n"
        "        hangs = os.environ['RRFP_RANK'] == '0' and microbatch.source == (0, 0)\n"
        "        time.sleep(600 * hangs)\n"
        "        return super().load(microbatch, fields)\n"
        "data = Hanging(lambda step: toy.microbatches(2, seed=step))\n"
        "list(toy.trainer(2, data=data, stall_seconds=2.0).steps(1))\n"
    )
    status, said = command("rrfp_jax", "launch", "-n", 2, script, folder=tmp_path)
    assert status == 1
    assert "waited for the data's load() of microbatch 0 of step 0, since" in said, said


@pytest.mark.slow(reason="6 s: a process")
def test_ctrl_c_does_not_wait_for_data(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import time\n"
        "from rrfp_jax.data.contract import InMemory\n"
        "from tests.support import toy\n"
        "class Slow(InMemory):\n"
        "    def load(self, microbatch, fields):\n"
        "        time.sleep(600 if microbatch.source[0] == 2 else 0)\n"
        "        return super().load(microbatch, fields)\n"
        "data = Slow(lambda step: toy.microbatches(2, seed=step))\n"
        "for report in toy.trainer(2, data=data).steps(4): print('done', report.step, flush=True)\n"
    )
    launch = "rrfp_jax", "launch", "-n", 2, script
    status, said = interrupted_at("[0] done 1", *launch, folder=tmp_path)
    assert status == 130 and "done 2" not in said, said


def test_settings_of_the_caller_hold_where_layers_are_traced_and_data_is_loaded():
    seen = []

    def note():
        guard = jax.config.jax_transfer_guard_device_to_device  # steps have another
        seen.append((threading.current_thread().name, jax.config.jax_default_matmul_precision, guard))

    def block(params, carry, mb):
        note()
        return toy.block(params, carry, mb)

    def data(step):
        note()
        return toy.microbatches(2, seed=step)

    embed, _, head = toy.layers()
    pipe = rrfp.Pipeline([embed, rrfp.layer(block, init=toy.block_init, repeat=2), head], toy.loss)
    with jax.default_matmul_precision("highest"), jax.transfer_guard_device_to_device("log"):
        list(toy.trainer(2, pipe=pipe, data=data).steps(2))
    assert {name.partition("-")[0] for name, _, _ in seen} == {"MainThread", "ThreadPoolExecutor", "rrfp"}
    assert {tuple(settings) for _, *settings in seen} == {("highest", "log")}


def puts(trainer, monkeypatch):
    """The steps whose data is put on the devices, and whether a step runs then; data is loaded in time."""
    engine, loader, found, running = trainer._engine, trainer._stepper.loader, [], []
    begin, load, run = loader.begin, engine.load, engine.driver.run

    def in_time(*given):
        begin(*given)
        loader.settle()

    def noted(step, known, own):
        found.append((step, bool(running)))
        return load(step, known, own)

    def runs(*args):
        running.append(True)
        records = run(*args)
        running.pop()
        return records

    monkeypatch.setattr(loader, "begin", in_time)
    monkeypatch.setattr(engine, "load", noted)
    monkeypatch.setattr(engine.driver, "run", runs)
    return found


@pytest.mark.slow(reason="3 s: Trainers of its own")
def test_the_next_steps_data_is_put_on_the_devices_while_the_last_tasks_run(monkeypatch):
    plain = toy.trainer(2)
    expected = [plain.step(toy.microbatches(3, seed=seed)).loss for seed in (0, 7, 2, 3)]
    trainer = toy.trainer(2, data=lambda step: toy.microbatches(3, seed=step))
    trainer.start()
    found = puts(trainer, monkeypatch)
    losses = [next(trainer.steps(3)).loss]  # and what has been put there for step 1 is for that data alone
    losses.append(trainer.step(toy.microbatches(3, seed=7)).loss)
    losses += [report.loss for report in trainer.steps(2)]
    assert losses == expected
    assert found == [(0, False), (1, True), (1, False), (2, False), (3, True)]


@pytest.mark.slow(reason="3 s: a Trainer of its own")
def test_data_is_put_on_the_devices_once_where_each_step_has_an_order_of_its_own(monkeypatch):
    trainer = toy.trainer(2, data=lambda step: toy.microbatches(3, seed=step), schedule="planned")
    trainer.start()
    found = puts(trainer, monkeypatch)
    assert [report.schedule for report in trainer.steps(4)][-1] == "planned"
    assert found == [(0, False), (1, True), (2, True), (3, True)]


@pytest.mark.slow(reason="3 s: a Trainer of its own")
def test_data_that_takes_more_than_microbatches_is_not_put_on_the_devices_ahead(monkeypatch):
    def data(step):  # of which the model reads little
        wide = np.zeros((2, 8, 4096), np.float32)
        return [mb | {"wide": wide} for mb in toy.microbatches(3, seed=step)]

    def narrow(params, carry, mb):
        made = toy.block(params, carry, mb)
        return made | {"x": made["x"] + mb["wide"].mean()}

    embed, _, head = toy.layers()
    pipe = rrfp.Pipeline([embed, rrfp.layer(narrow, init=toy.block_init, repeat=2), head], toy.loss)
    trainer = toy.trainer(2, pipe=pipe, data=data)
    trainer.start()
    found = puts(trainer, monkeypatch)
    list(trainer.steps(2))
    assert found == [(0, False), (1, False)]
