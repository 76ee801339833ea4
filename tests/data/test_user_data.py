"""Data that users write: buffers that are filled again, and what it raises, which is told as theirs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.data.contract import as_data, load_checked, plan_hash, plan_step, steps_of
from rrfp_jax.user_code import own_traceback
from tests.support import toy
from tests.train.test_processes import command

ROOT = Path(__file__).parents[2]
STEPS, COUNT = 4, 3


def fresh(step):
    return toy.microbatches(COUNT, seed=step)


def losses(data):
    return [report.loss for report in toy.trainer(2, data=data).steps(STEPS)]


class Reusing:
    """Loads every microbatch into the same buffers, as many loaders do."""

    def __init__(self):
        self.buffers = {
            name: np.zeros(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
            for name, value in fresh(0)[0].items()
        }

    def plan(self, step):
        fields = {name: jax.ShapeDtypeStruct(b.shape, b.dtype) for name, b in self.buffers.items()}
        return [rrfp.Microbatch(fields, source=(step, j)) for j in range(COUNT)]

    def load(self, microbatch, fields):
        step, j = microbatch.source
        for name, value in fresh(step)[j].items():
            self.buffers[name][...] = value
        return self.buffers  # more than was asked for


class Yielding:
    """A function of the step that yields the same buffers for every microbatch."""

    def __init__(self):
        self.buffers = {name: value.copy() for name, value in fresh(0)[0].items()}

    def __call__(self, step):
        for mb in fresh(step):
            for name, value in mb.items():
                self.buffers[name][...] = value
            yield self.buffers


class Drawing(Reusing):
    """Draws anew at each load, into the same buffers."""

    random = np.random.default_rng(0)

    def load(self, microbatch, fields):
        super().load(microbatch, fields)
        self.buffers["labels"][...] = self.random.integers(0, toy.VOCABULARY, self.buffers["labels"].shape)
        return self.buffers


@pytest.fixture(scope="module")
def expected():
    return losses(fresh)


@pytest.mark.slow(reason="a Trainer for each case")
@pytest.mark.parametrize("data", [Reusing, Yielding])
def test_buffers_may_be_filled_again_as_soon_as_they_have_been_given(data, expected):
    assert losses(data()) == expected
    trainer = toy.trainer(2, data=data())
    assert trainer.check().ok
    assert trainer.evaluate(data(), steps=2) == toy.trainer(2, data=fresh).evaluate(fresh, steps=2)


def test_what_a_step_was_given_may_change_while_the_next_ones_run(expected):
    trainer, found = toy.trainer(2, data=None), []
    for step in range(STEPS):
        batch = fresh(step)
        found.append(trainer.step(batch).loss)
        for mb in batch:
            for value in mb.values():
                value[...] = 0
    assert found == expected
    same = [trainer.value_and_grad(given)[0] for given in (fresh(0), Yielding()(0))]
    assert same[0] == same[1], "a generator fills the same buffers"


def test_a_load_that_draws_anew_into_one_buffer_is_found_out():
    with pytest.raises(rrfp.UsageError, match="different values for field 'labels'"):
        toy.trainer(2, data=Drawing())


# What it raises.


class Failing(Reusing):
    """Fails in its own way at one step, when it is asked for a plan, or for arrays."""

    def __init__(self, fail, step, where):
        super().__init__()
        self.fail, self.step, self.where = fail, step, where

    def plan(self, step):
        if self.where == "plan" and step == self.step:
            self.fail()
        return super().plan(step)

    def load(self, microbatch, fields):
        if self.where == "load" and microbatch.source[0] == self.step:
            self.fail()
        return super().load(microbatch, fields)


def disk():
    raise OSError("disk of the user")


def ends():
    next(iter(()))


def leaves():
    sys.exit(0)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("where", ["plan", "load"])
@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (disk, "raised OSError: disk of the user"),
        (ends, "raised StopIteration: it has come to its end"),
        (leaves, r"called sys.exit\(0\)"),
    ],
)
def test_what_data_raises_is_told_with_step_and_their_own_traceback(fail, said, where, step):
    data = Failing(fail, step, where)
    named = rf"step {step}: the data's {where}\(.*\).* {said}"
    with pytest.raises(rrfp.TrainingError, match=named) as raised:
        losses(data)
    text = str(raised.value)
    assert f"in {fail.__name__}" in text and f"in {where}" in text
    assert str(ROOT / "rrfp_jax") not in text, text  # only their files


def test_a_folder_whose_name_begins_like_the_package_is_the_users():
    file = str(ROOT / "rrfp_jax_models" / "theirs.py")
    with pytest.raises(OSError, match="disk") as raised:
        exec(compile("def read():\n    raise OSError('disk')\nread()", file, "exec"), {})
    without_this_test = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert file in own_traceback(without_this_test)


@pytest.mark.parametrize("steps", [0, 1.5, True, "2", lambda: 2])
def test_steps_that_are_no_count_are_refused_as_the_datas(steps):
    data = Reusing()
    assert steps_of(data) == 1
    data.steps = None
    assert steps_of(data) == 1
    data.steps = steps
    with pytest.raises(rrfp.UsageError, match=f"^the data's steps is {re.escape(repr(steps))}: "):
        toy.trainer(1).evaluate(data)


@pytest.mark.parametrize("buckets", [(128, 256), 3, np.ones(2), [["x"]], [{"x": 3}]])
def test_buckets_that_are_none_are_refused_with_their_form(buckets):
    data = Reusing()
    data.buckets = buckets
    with pytest.raises(rrfp.UsageError, match=r"^the data's buckets=.*ShapeDtypeStruct.* otherwise$"):
        plan_step(data, 0)


def test_where_a_source_lies_is_not_compared():
    fields = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
    here, there = object(), object()
    assert repr(here) != repr(there)
    hashes = {plan_hash([rrfp.Microbatch(fields, source=source)]) for source in (here, there)}
    assert len(hashes) == 1 != len(hashes | {plan_hash([rrfp.Microbatch(fields, source=7)])})


def test_fields_that_are_no_dict_are_refused():
    data = Reusing()
    data.plan = lambda step: [rrfp.Microbatch(["x"])]
    with pytest.raises(rrfp.UsageError, match=r"^step 0: microbatch 0: its fields are \['x'\]: give a dict"):
        plan_step(data, 0)


def test_what_the_data_itself_refuses_stays_a_refusal():
    def data(step):
        raise rrfp.UsageError("give more text")

    with pytest.raises(rrfp.UsageError, match=r"^give more text$"):
        toy.trainer(2, data=data)


@pytest.mark.parametrize("given", [[1, 2], None, "tokens"])
def test_a_load_that_gives_no_dict_is_refused(given):
    data = Reusing()
    data.load = lambda microbatch, fields: given
    with pytest.raises(rrfp.UsageError, match=f"load.. gave {type(given).__name__}, not arrays by the names"):
        toy.trainer(2, data=data)


ENDS = """
import sys
from tests.support import toy

def data(step):
    if step == 2:
        sys.exit()
    return toy.microbatches(2, seed=step)

for report in toy.trainer(2, data=data).steps(5):
    print("done", report.step, flush=True)
"""


@pytest.mark.slow(reason="4 s: a process")
def test_a_script_whose_data_exits_does_not_look_as_if_it_had_ended_well(tmp_path):
    (tmp_path / "train.py").write_text(ENDS)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1 and "done 1" in done.stdout and "done 2" not in done.stdout
    assert "step 2: the data's plan(2) called sys.exit()" in done.stderr


@pytest.mark.slow(reason="6 s: processes")
def test_of_several_processes_the_rank_is_told_too(tmp_path):
    (tmp_path / "train.py").write_text(
        ENDS.replace("if step", "import os\n    if os.environ['RRFP_RANK'] == '1' and step")
    )
    status, said = command("rrfp_jax", "launch", "-n", 2, tmp_path / "train.py", folder=tmp_path)
    assert status == 1, said
    assert "rank 1" in said and "step 2: the data's plan(2) called sys.exit()" in said


def test_what_only_iterates_is_told_what_makes_data_of_it():
    class Loader:
        def __iter__(self):
            return iter([])

    with pytest.raises(
        rrfp.UsageError, match=r"data=Loader\(...\): .*; of what it iterates over: rrfp.data.Stream"
    ):
        as_data(Loader())


class Wide(Reusing):
    """Plans and loads 64-bit numbers."""

    def __init__(self, labels):
        super().__init__()
        self.buffers["labels"] = np.full_like(self.buffers["labels"], labels, np.int64)

    def load(self, microbatch, fields):
        return self.buffers


def test_loaded_numbers_beyond_those_of_jax_are_refused():
    data = Wide(2**32 + 5)
    with pytest.raises(rrfp.UsageError, match="field 'labels' has 4294967301, beyond the int32"):
        load_checked(data, 0, 0, data.plan(0)[0], ["labels"])
    data = Wide(5)
    loaded = load_checked(data, 0, 0, data.plan(0)[0], ["labels"])["labels"]
    assert loaded.dtype == np.int32 and (loaded == 5).all()


def test_buckets_of_64_bits_take_such_elements():
    spec = jax.ShapeDtypeStruct((2,), np.int64)
    stream = rrfp.data.Stream([{"x": np.array([1, 2])}], 1, buckets=[{"x": spec}])
    (planned,) = plan_step(stream, 0)
    assert planned.fields["x"].dtype == np.int32


@pytest.mark.parametrize("dtype", ["g", "G", "M8[s]", "m8[s]", [("a", "f4")], "U1", "O"])
def test_what_jax_has_no_numbers_for_is_refused_by_its_name(dtype):
    with pytest.raises(
        rrfp.UsageError, match=f"'x' of microbatch 0 has dtype {re.escape(str(np.dtype(dtype)))}"
    ):
        as_data([{"x": np.zeros(2, dtype)}])


def test_a_load_may_give_the_other_order_of_bytes_than_planned():
    data = Wide(5)
    (planned, *_) = data.plan(0)
    data.buffers["labels"] = data.buffers["labels"].astype(">i8")
    assert (load_checked(data, 0, 0, planned, ["labels"])["labels"] == 5).all()


@pytest.mark.parametrize("dtype", [">f4", ">i8", "?"])
def test_numbers_in_the_other_order_of_bytes_are_the_same(dtype):
    data = as_data([{"x": np.ones(2, dtype)}])
    jax.device_put(data.load(data.plan(0)[0], ["x"])["x"])
    assert data.load(data.plan(0)[0], ["x"])["x"].tolist() == [1, 1]
