"""`split="auto"`: found by predicted costs, the same on all processes."""

import dataclasses
import json

import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from configs import quickstart
from models import gpt
from rrfp_jax.core.tasks import Placement
from tests.support.quickstart import ROOT, tiny
from tests.support.refusals import BATCH, refused
from tests.support.toy import made
from tests.train.test_processes import command


def heavy_head(stages=2, **kwargs):
    """Embedding, four blocks, and a head over a large vocabulary."""
    cfg = gpt.GPTConfig(d_model=16, n_heads=2, d_ff=16, n_layers=4, vocab_size=4096)
    layers = [
        rrfp.layer(gpt.Embed, cfg),
        rrfp.layer(gpt.Block, cfg, repeat=4),
        rrfp.layer(gpt.Head, cfg),
    ]
    pipe = rrfp.Pipeline(layers, quickstart.loss)
    return made(
        pipe, optax.adam(1e-3), mesh=rrfp.Mesh(pp=stages, share_devices=True), **{"data": BATCH, **kwargs}
    )


class TestAuto:
    @pytest.mark.costly(reason="costs of all layers are measured")
    def test_a_heavy_head_gets_a_stage_of_its_own(self):
        trainer = heavy_head(split="auto")
        assert trainer._engine.chunks == [[range(5)], [range(5, 6)]]
        even = heavy_head()
        assert even._engine.chunks == [[range(3)], [range(3, 6)]]

    @pytest.mark.slow(reason="4 s: two Trainers; train/test_parity.py has splits")
    def test_its_loss_is_that_of_an_even_split(self):
        trainer, even = heavy_head(split="auto"), heavy_head()
        reports = [next(iter(own.steps(1))) for own in (trainer, even)]
        np.testing.assert_allclose(reports[0].loss, reports[1].loss, rtol=1e-5)

    @pytest.mark.slow(reason="costs are measured twice")
    def test_it_is_the_same_every_time(self):
        assert len({str(heavy_head(3, split="auto")._engine.chunks) for _ in range(3)}) == 1

    @pytest.mark.slow(reason="2 s: costs of all layers are measured")
    def test_chunks(self):
        trainer = heavy_head(2, split="auto", schedule="interleaved-1f1b", data=[*BATCH, BATCH[0]])
        sizes = [len(layers) for chunks in trainer._engine.chunks for layers in chunks]
        assert sum(sizes) == 6 and len(sizes) == 4
        assert trainer._engine.placement == Placement(2, 2)

    def test_an_order_that_is_not_defined_is_refused(self):
        with refused("interleaved 1F1B needs a multiple of 2", "got 3: give 2 or 4"):
            heavy_head(2, split="auto", schedule="interleaved-1f1b")

    def test_too_few_layers_are_refused(self):
        with refused("7 stages for 6 layers: each stage needs at least one; use at most 6"):
            heavy_head(7, split="auto")

    def test_it_needs_data(self):
        with refused("split='auto'", "data="):
            heavy_head(split="auto", data=None)

    def test_other_words_are_refused(self):
        with refused("split='even'", "give 'auto', or a list"):
            heavy_head(split="even")

    def test_too_little_memory_is_refused(self, monkeypatch):
        monkeypatch.setattr("rrfp_jax.train.tuning.memory_limit", lambda device: 10**5)
        with refused(
            "split='auto': no split into 2 virtual stages fits",
            "layers 5 to 5",
            "of 95,000 bytes",
            "more stages",
        ):
            heavy_head(split="auto")

    def test_in_a_config(self):
        config = dataclasses.replace(quickstart.get_config(), split="auto")
        assert (config.split, config.layers_per_virtual_stage) == (("auto",), "auto")

    @pytest.mark.slow(reason="14 s: processes; in one, the other tests of this class")
    def test_all_processes_agree(self, text, tmp_path):
        given = [*tiny(text), "--config.split=auto", f"--config.directory={tmp_path}"]
        status, said = command("rrfp_jax", "launch", *given, folder=ROOT, limit=400.0)
        assert status == 0, said
        stages = json.loads((tmp_path / "quickstart" / "memory.json").read_text())
        assert [layer for stage in stages for layer in stage["layers"]] == [[0, 3], [3, 5]]
