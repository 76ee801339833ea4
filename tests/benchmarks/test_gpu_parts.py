"""The parts of the check for GPU machines one by one: what they judge, predict and know of models."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.gpu import configurations, costs, parity, throughput
from models.decoder import Block
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.trace.records import Part as TracePart
from rrfp_jax.trace.records import StepTrace, TaskRecord


class TestJudgement:
    def test_parity_notices_a_wrong_gradient(self, monkeypatch):
        right = {"0": {"w": np.float32([1.0, -2.0])}, "1": {"w": np.float32([4.0])}}
        wrong = {"0": {"w": np.float32([1.0, -2.002])}, "1": {"w": np.float32([4.0])}}
        runs = [("bf", 3.0, right), ("1f1b", 3.0, right)]
        case = SimpleNamespace(trainer=SimpleNamespace(stage_params=right), pipe=None, data=[])
        case.gradients = lambda: runs
        monkeypatch.setattr(parity.PlainStep, "value_and_grad", lambda _: (3.0, right))
        monkeypatch.setattr(parity.Case, "of", lambda *_: case)
        figures = {}
        assert parity.check("float32", True, figures) == {"bf and 1f1b (run 1)": []}
        assert figures["schedules"]["bf"]["leaf_error"] == 0
        runs[1] = ("1f1b", 3.0, wrong)
        assert parity.check("bfloat16", True, {}) == {"bf and 1f1b (run 1)": ["['0']['w']"]}
        with pytest.raises(RuntimeError, match=r"1f1b: 0\.w is off by 1\.0e-03, limit 0\.0001"):
            parity.check("float32", True, figures)
        assert figures["schedules"]["1f1b"]["leaf"] == "0.w"  # kept, although it failed
        wrong["1"]["w"][0] = np.nan
        with pytest.raises(RuntimeError, match=r"1f1b: 1\.w is off by inf"):
            parity.check("float32", True, {})

    def test_gaps(self):
        def record(stage, kind, start, end):
            return TaskRecord(stage, Task(kind, 0, 0), 0, start, start, start, end)

        records = [
            record(0, FORWARD, 1.0, 2.0),
            record(1, FORWARD, 2.5, 3.0),
            record(1, BACKWARD, 3.00001, 5.0),
        ]
        found = throughput.gaps([StepTrace(0, 2, [TracePart.of(records)])])
        assert found["idle_percent_of_step"] == pytest.approx(100 * 0.50001 / 4, abs=1e-3)
        assert found["long_gaps_per_step"] == 1 and found["longest_gap_us"] == 5e5


PUBLISHED = {  # parameters of all layers: of the whole model, less embeddings where they count
    "GPT3-Large": 760e6 - (50257 + 2048) * 1536,
    "Qwen3-1.7B": 1.72e9 - 151936 * 2048,
    "Qwen3-4B": 4.02e9 - 151936 * 2560,
    "LLaMA3-8B": 8.03e9 - 2 * 128256 * 4096,
    "ViT-H/14": 632e6,
    "ViT-g/14": 1011e6,
    "ViT-bigG/14": 1843e6,
    "InternViT-6B": 5.54e9,
    "ViT-22B/14": 21.7e9,
}


ALL = [*configurations.DECODERS, *configurations.ENCODERS]
TINY = [configurations.TINY_DECODER, configurations.TINY_ENCODER]


class TestLayers:
    @pytest.mark.parametrize("of", ALL, ids=lambda of: of.name)
    def test_sizes_add_up_to_the_published_model(self, of):
        block = nnx.eval_shape(lambda: Block(of.model, rngs=nnx.Rngs(0)))
        total = of.model.n_layers * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(block, nnx.Param)))
        assert total == pytest.approx(PUBLISHED[of.name], rel=0.01)
        assert of.source

    @pytest.mark.parametrize("of", TINY, ids=lambda of: of.name)
    def test_only_decoders_are_causal(self, of):
        model = replace(of.model, dtype=jnp.float32, attention="xla", init_scale=1.0)
        block = Block(model, rngs=nnx.Rngs(0))
        x = np.random.default_rng(0).normal(size=(1, 6, model.d_model)).astype(np.float32)
        changed = x.copy()
        changed[0, 4] += 1
        before, after = (np.asarray(block(value, {})) for value in (x, changed))
        assert before.shape == x.shape and not np.array_equal(before[0, 5], after[0, 5])
        assert np.array_equal(before[0, :4], after[0, :4]) == model.causal

    def test_rows_of_decoders_keep_to_the_models_context(self):
        row = costs.Row.decoder(configurations.GPT3_LARGE, 8192)
        assert (row.count, row.length) == (4, 2048)
        assert costs.Row.decoder(configurations.LLAMA3_8B, 8192).count == 1
