"""Which `rebalance=` a run cannot have."""

import dataclasses
import json

import pytest

import rrfp_jax as rrfp
from rrfp_jax.runs.config_file import load_config
from rrfp_jax.trace.costs import constant
from rrfp_jax.train.pace import Pace
from tests.support import toy
from tests.train.test_ahead import ROOT


def test_what_cannot_be_is_refused():
    with pytest.raises(rrfp.UsageError, match="rebalance='always': choose 'off', 'suggest' or 'auto'"):
        toy.trainer(2, rebalance="always")
    with pytest.raises(rrfp.UsageError, match="rebalance='auto' with stages of 1, 2 devices"):
        toy.trainer(2, rebalance="auto", mesh=rrfp.Mesh(pp=2, tp=(1, 2)))


def test_a_stand_in_for_the_model_has_no_layers(tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(constant(2, 4, 2e-3).as_json_object()))
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    with pytest.raises(rrfp.UsageError, match="rebalance=auto with pace"):
        dataclasses.replace(config, rebalance="auto", pace=Pace(workload=str(tmp_path / "w.json")))
