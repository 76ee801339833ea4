"""Refused at the start: microbatches, plans and loads that do not keep to the contract."""

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from tests.support.refusals import BATCH, copied, make, refused, same


class Planned:
    """BATCH as an object with `plan` and `load`; from a step on, what it loads is changed."""

    def __init__(self, change=dict, step=0):
        self.change, self.step = change, step

    def plan(self, step):
        specs = [{k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in mb.items()} for mb in BATCH]
        return [rrfp.Microbatch(spec, source=(step, j)) for j, spec in enumerate(specs)]

    def load(self, microbatch, fields):
        step, j = microbatch.source
        arrays = {name: BATCH[j][name] for name in fields}
        return self.change(arrays) if step >= self.step else arrays


BROKEN_LOADS = [
    (lambda arrays: {k: v for k, v in arrays.items() if k != "labels"}, ["'labels'", "not loaded"]),
    (lambda arrays: {k: v[:, :7] for k, v in arrays.items()}, ["[2, 7]", "planned as", "[2, 8]"]),
    (lambda arrays: {k: v.astype(np.int16) for k, v in arrays.items()}, ["int16[2, 8]", "planned as"]),
]


class TestData:
    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            ([], ["0 microbatches", "at least one"]),
            (lambda step: [], ["step 0", "0 microbatches", "at least one"]),
            (3, ["data=", "plan(step)", "list of microbatches"]),
            (BATCH[0], ["data=", "list of microbatches"]),
            ([np.zeros(3)], ["dict of arrays"]),
            ([{}], ["dict of arrays", "at least one field"]),
            ([{"tokens": [["a"]]}], ["'tokens'", "<U1", "numbers"]),
            ([{"tokens": [[1], [1, 2]]}], ["'tokens'", "ragged"]),
        ],
        ids=["empty", "empty-step", "number", "dict", "array", "no-field", "text", "ragged"],
    )
    def test_no_microbatches(self, data, said):
        with refused(*said):
            make(data=data)

    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize("method", ["step", "value_and_grad", "evaluate"])
    @pytest.mark.parametrize("given", [[], [np.zeros(3)], BATCH[0]], ids=["none", "array", "dict"])
    def test_no_microbatches_given_to_a_method(self, method, given):
        with refused("microbatch"):
            getattr(make(data=None), method)(given)

    @pytest.mark.usefixtures("nothing_compiles")
    @pytest.mark.parametrize(("change", "said"), BROKEN_LOADS, ids=["missing", "shape", "dtype"])
    def test_a_load_that_does_not_keep_to_the_plan(self, change, said):
        with refused("step 0, microbatch 2", *said):
            make(data=Planned(change))

    @pytest.mark.parametrize(("change", "said"), BROKEN_LOADS, ids=["missing", "shape", "dtype"])
    def test_a_later_load_that_does_not(self, trainer, change, said):
        before = copied(trainer)
        trainer._data = Planned(change, step=trainer.steps_done)
        with refused(f"step {trainer.steps_done}, microbatch 0", *said):
            next(trainer.steps(1))
        assert same(trainer, before)
        trainer._data = Planned()
        next(trainer.steps(1))
        assert not same(trainer, before)

    def test_a_plan_of_specs_is_as_good_as_arrays(self, trainer):
        assert trainer.evaluate(Planned()) == trainer.evaluate(BATCH)
