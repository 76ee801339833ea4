"""`rrfp plan` and `split="auto"`: predictions against what a started Trainer says of itself."""

import dataclasses
import json
import os
import sys

import jax
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from configs import gpt3_large, gpt_lengths, llama3_70b, quickstart, qwen3_4b
from rrfp_jax.commands.plan import plan_run
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import name_of
from rrfp_jax.core.step_rules import bucket_name
from rrfp_jax.data.contract import as_data, buckets_of, plan_step
from rrfp_jax.forecast.costs import ModelCosts
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS
from rrfp_jax.forecast.forecast import Devices, Estimate
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.model.roles import layers_of_chunks
from rrfp_jax.sim.choice import CANDIDATES
from rrfp_jax.train.named import schedule_of
from tests.support import toy
from tests.support.commands import plan as main
from tests.support.quickstart import ROOT, tiny
from tests.support.refusals import BATCH
from tests.train.test_processes import command

H100, NVLINK = ACCELERATORS["h100"], LINKS["nvlink4"]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XLA_FLAGS", "")


class TestLedger:
    """What is predicted of a stage, against what its Trainer says once it has started."""

    @pytest.mark.costly(reason="a Trainer, and the costs of its layers")
    @pytest.mark.parametrize(
        ("schedule", "options"),
        [
            ("bfw", {"layers_per_program": 3}),
            ("interleaved-1f1b", {"frozen": "0.*", "remat": "full"}),
            ("bf", {"equal_schedules": True}),
        ],
    )
    def test_is_that_of_a_started_trainer(self, schedule, options):
        mesh = rrfp.Mesh(pp=2, share_devices=True, chunks=2 if "interleaved" in schedule else None)
        optimizer = optax.adamw(1e-3)
        settings = {k: v for k, v in options.items() if k != "frozen"}
        pipe = toy.pipeline(frozen=options.get("frozen", ()))
        data = [*BATCH, BATCH[0]]
        trainer = toy.made(pipe, optimizer, data=data, mesh=mesh, schedule=schedule, **settings)
        found = trainer.start()
        buckets = buckets_of(plan_step(as_data(data), 0))
        rules = trainer._stepper.rules(len(data), "train")
        kinds = {kind for s in range(2) for own in rules.backward_kinds(s) for kind in own}
        model = ModelCosts.of(pipe, buckets, optimizer, Settings(**settings), kinds, rules.joined)
        devices = Devices(accelerator=H100, link=NVLINK, memory=None, setting=None)
        estimate = Estimate(model=model, buckets=buckets, rules=rules, devices=devices)
        for s, chunks in enumerate(layers_of_chunks(len(pipe), rules.placement, None)):
            ledger, kinds = found[s], rules.backward_kinds(s)
            states = [model.states[i] for layers in chunks for i in layers]
            for name, expected in (
                ("parameters", ledger.parameters),
                ("weight_bytes", ledger.weight_bytes),
                ("sum_bytes", ledger.accumulator_bytes),
            ):
                assert sum(getattr(state, name) for state in states) == expected
            assert sum(map(estimate._fixed_bytes, states)) <= estimate._ledger(s, chunks).fixed_bytes
            assert estimate._ledger(s, chunks).parked_gradient_bytes == ledger.parked_gradient_bytes
            predicted = model.bucket_ledger(buckets[0], chunks, kinds)
            actual = ledger.buckets[bucket_name(buckets[0])]
            counters = 4 * len(states)  # of Adam, one a layer here and one a stage there
            assert abs(sum(s.optimizer_bytes for s in states) - ledger.optimizer_bytes) <= counters
            assert predicted.data_bytes == actual.data_bytes
            for mine, theirs in zip(predicted.chunks, actual.chunks, strict=True):
                for name in ("activation_in_bytes", "gradient_in_bytes", "gradient_out_bytes"):
                    assert getattr(mine, name) == getattr(theirs, name), name
                sent = (
                    theirs.activation_out_bytes
                )  # less what an earlier layer of the virtual stage holds as well
                assert sent <= mine.activation_out_bytes <= 1.05 * sent
                for name in ("held_after_forward_bytes", "held_after_input_bytes"):
                    assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=0.1), name


class TestForecast:
    @pytest.mark.slow(reason="costs of published models")
    def test_published_sizes(self):
        expected = {gpt3_large: 760_300_032, qwen3_4b: 4_022_468_096, llama3_70b: 70_553_706_496}
        for module, parameters in expected.items():
            config = module.get_config()
            planned = plan_run(config, H100, NVLINK, 60 * 10**9)
            model = planned.estimate.model
            assert model.parameters == parameters
            assert planned.own.does_not_fit is None and planned.none_fits is None
            (layers,) = model.layers.values()
            tokens, block = config.batch * config.sequence_length, config.model
            (forward,) = [sum(c.flops.values()) for kind, c in layers[1].programs.items() if kind == 0]
            attention = 4 * tokens * config.sequence_length * block.n_heads * block.head_size
            assert forward == pytest.approx(2 * model.states[1].parameters * tokens + attention, rel=0.03)

    @pytest.mark.slow(reason="costs of every bucket")
    def test_every_bucket_that_there_may_be(self):
        given = {"path": str(ROOT / "docs"), "buckets": 3, "microbatches": 1}
        config = dataclasses.replace(gpt_lengths.get_config(), **given)
        stage = plan_run(config, H100, NVLINK, None).own.stages[0]
        lengths = config.train_data().bucket_lengths
        named = zip(lengths, stage.ledger.buckets, strict=True)
        assert all(f"tokens int32[4,{length}]" in name for length, name in named)
        assert len(lengths) == 3 and list(stage.flops) == sorted(stage.flops)
        assert stage.flops_of_step in stage.flops  # of the one that the step has

    @pytest.mark.slow(reason="2 s: two forecasts")
    def test_doubling_what_the_card_does_halves_the_compute(self):
        config = quickstart.get_config()
        fast, slow = (plan_run(config, H100.at(x), NVLINK, None).own for x in (1.0, 0.5))
        halved = [2 * stage.compute_seconds for stage in fast.stages]
        assert [stage.compute_seconds for stage in slow.stages] == pytest.approx(halved)
        assert fast.step_seconds < slow.step_seconds < 2 * fast.step_seconds  # transfers stay what they are
        assert [s.flops for s in slow.stages] == [s.flops for s in fast.stages]

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "bfw"])
    def test_every_schedule(self, schedule):
        config = dataclasses.replace(quickstart.get_config(), schedule=schedule)
        own = plan_run(config, ACCELERATORS["cpu"], LINKS["loopback"], None).own
        work = max(stage.compute_seconds for stage in own.stages)
        assert work <= own.makespan <= 2 * work and 0 < own.bubble < 0.5
        assert isinstance(schedule_of(schedule), FixedOrder) == (schedule != "bfw")

    def test_shared_cores_do_no_more_than_there_are(self):
        config, accelerator = quickstart.get_config(), ACCELERATORS["cpu"]
        alone, shared = (
            plan_run(config, dataclasses.replace(accelerator, together=n), LINKS["loopback"], None).own
            for n in (None, 1)
        )
        assert shared.makespan == sum(stage.compute_seconds for stage in alone.stages)
        assert shared.makespan > 2 * alone.makespan

    @pytest.mark.slow(reason="5 s")
    def test_stages_on_one_device_take_turns_and_share_its_memory(self):
        config = quickstart.get_config()
        mesh = dataclasses.replace(config.mesh, share_devices=True)
        shared = dataclasses.replace(config, mesh=mesh)
        apart, together = (plan_run(one, H100, NVLINK, 60 * 10**9).own for one in (config, shared))
        assert together.makespan == sum(stage.compute_seconds for stage in apart.stages)
        assert together.update_seconds == pytest.approx(sum(stage.update_seconds for stage in apart.stages))
        assert together.bubble == pytest.approx(0) and apart.bubble > 0
        peaks = [stage.peak_bytes for stage in apart.stages]
        assert apart.peak_bytes == max(peaks) and max(peaks) < together.peak_bytes < sum(peaks)
        little = sum(stage.ledger.fixed_bytes for stage in apart.stages)
        own = [plan_run(one, H100, NVLINK, little).own for one in (config, shared)]
        assert own[0].does_not_fit is None and "needs" in own[1].does_not_fit
        unlimited = dataclasses.replace(shared, activation_budget=None)
        own = plan_run(unlimited, H100, NVLINK, little).own
        assert own.does_not_fit.startswith(f"its 4 stages hold up to {own.peak_bytes:,} bytes")
        assert "all stages share one, in turn" in str(plan_run(shared, H100, NVLINK, None))

    @pytest.mark.slow(reason="6 s: forecasts of all hints")
    def test_auto_plans_with_the_hint_that_it_chooses(self):
        config = dataclasses.replace(qwen3_4b.get_config(), schedule="auto", split=())
        planned = plan_run(config, H100, NVLINK, 60 * 10**9)
        chosen = name_of(planned.estimate.rules.schedule)
        assert chosen in CANDIDATES and f"schedule auto ({chosen}: " in str(planned)
        assert planned.own.makespan <= plan_run(qwen3_4b.get_config(), H100, NVLINK, 60 * 10**9).own.makespan

    def test_too_little_memory_is_said(self):
        planned = plan_run(qwen3_4b.get_config(), H100, NVLINK, 16 * 10**9)
        assert "needs" in planned.own.does_not_fit and "no split into 8 virtual stages" in planned.none_fits
        assert "DOES NOT FIT" in str(planned) and "No split into " in str(planned)


class TestCommand:
    def test_table_and_figures(self, text, tmp_path, capsys):
        file = tmp_path / "plan.json"
        arguments = [*tiny(text), "--card=a100-80", "--link=1e9,1e-5", "--efficiency=0.5", f"--json={file}"]
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert "quickstart: 5 layers" in out and "on 2 stages" in out and "156 TFLOP/s" in out and err == ""
        assert "\n stage  " in out and "\n 0  " in out
        figures = json.loads(file.read_text())
        own = figures["own"]
        assert own["split"] == [3, 2] and len(own["stages"]) == 2 and own["step_seconds"] > own["makespan"]
        assert figures["device_bytes"] == 60e9 and figures["link"]["bytes_per_second"] == 1e9
        assert sum(stage["parameters"] for stage in own["stages"]) == 13_680
        assert len(own["stages"][0]["flops"]) == 1 and own["stages"][1]["peak_bytes"] > 0

    def test_stages_by_a_flag(self, text, capsys):
        assert main([*tiny(text), "--config.mesh.pp=3", "--card=h200", "--config.split=auto"]) == 0
        out, _ = capsys.readouterr()
        assert "on 3 stages" in out and out.count("step ") == 1 and "suggested split" in out

    def test_a_measured_accelerator_gives_the_share_that_is_asked_for(self, text, tmp_path, monkeypatch):
        def measured(device):
            share = float(os.environ["XLA_CLIENT_MEM_FRACTION"])
            return dataclasses.replace(H100, name="measured", memory=int(share * H100.memory))

        monkeypatch.setattr("rrfp_jax.forecast.cost_analysis.measured_accelerator", measured)
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # JAX refuses both
        file = tmp_path / "plan.json"
        assert main([*tiny(text), "--card=measured", "--memory-share=0.5", f"--json={file}"]) == 0
        assert json.loads(file.read_text())["device_bytes"] == 40e9
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ

    def test_nothing_is_loaded(self, text, monkeypatch, capsys):
        monkeypatch.setattr(rrfp.data.ByteText, "load", lambda *args: pytest.fail("loaded"))
        assert main([*tiny(text), "--card=h100"]) == 0

    def test_help(self, capsys):
        assert main(["--help"]) == 0
        assert "h100-pcie" in capsys.readouterr().out
        assert main([f"--config={ROOT / 'configs' / 'llama3_70b.py'}", "--help"]) == 0
        assert "--config.model.d_ff=28672" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--card=h100"], "no --config given"),
            (["--config=none.py", "--card=h100"], "--config=none.py: no such file"),
            ([..., "--card=abacus"], "--card=abacus: choose one of a100-40"),
            ([..., "--card=h100", "--link=fast"], "--link=fast: choose one of nvlink3"),
            ([..., "--card=h100", "--link=0,0"], "--link=0,0"),
            ([..., "--card=h100", "--link=inf,0"], "--link=inf,0"),
            ([..., "--card=h100", "--efficiency=0"], "--efficiency=0: give a share above 0"),
            ([..., "--card=h100", "--memory-share=2"], "--memory-share=2: give a share"),
            ([..., "--card=cpu", "--memory-share=0.5"], "device cpu has no limit on memory; leave it out"),
            ([..., "--card=h100", "--config.mesh.tp=2"], "mesh.tp=2, mesh.dp=1: a plan knows"),
            ([..., "--card=h100", "--json=no/where.json"], "there is no folder no"),
            ([..., "--card=h100", "--config.mesh.pp=9"], "9 stages for 5 layers"),
            ([..., "--card=h100", "--config.mesh.pp=x"], "--config.mesh.pp=x"),
            ([..., "--card=h100", "--config.split=(1,1)"], "add up to 5"),
            ([..., "--card=h100", "--config.split=even"], "split='even': give 'auto', or"),
            ([..., "--card=h100", "--steps=3"], "--steps=3: no such flag"),
            ([..., "--card=h100", "--config.schedule=zb"], "no such schedule"),
        ],
        ids=lambda value: value[-1] if isinstance(value, list) else "",
    )
    def test_refusals(self, text, arguments, said, capsys):
        given = [*tiny(text), *arguments[1:]] if arguments[0] is ... else arguments
        assert main(given) == 2
        out, err = capsys.readouterr()
        assert said in err and err.startswith("rrfp plan: ") and err.count("\n") == 1 and out == ""

    @pytest.mark.slow(reason="4 s: it measures this machine")
    def test_this_machine(self, text):
        """In a process of its own: it measures with one thread."""
        status, said = command("rrfp_jax", "plan", *tiny(text), folder=ROOT)
        assert status == 0 and "device measured (measured on cpu)" in said

    @pytest.mark.slow(reason="3 s: a process; data/test_sources.py has what is skipped")
    def test_what_is_skipped_is_told_in_one_line(self, tmp_path):
        for name, text in {"a.txt": "one and two", "b.txt": "three and four", "none.txt": ""}.items():
            (tmp_path / name).write_text(text)
        given = [f"--config={ROOT / 'configs' / 'gpt_lengths.py'}", f"--config.path={tmp_path}", "--card=cpu"]
        status, said = command("rrfp_jax", "plan", *given, "--config.document=file", folder=ROOT)
        assert status == 0
        assert said.endswith("\nrrfp plan: 1 of 3 documents skipped: 1 too short: none.txt\n")


@pytest.mark.slow(reason="13 s: a command that compiles")
def test_random_tokens():
    config = gpt3_large.get_config()
    small = dataclasses.replace(config.model, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, head_size=8)
    small = dataclasses.replace(small, d_ff=32, vocab_size=64, max_length=8)
    config = dataclasses.replace(
        config, model=small, sequence_length=8, microbatches=2, activation_budget=None
    )
    config = dataclasses.replace(config, mesh=rrfp.Mesh(pp=1))
    data = config.train_data()
    planned = data.plan(3)[1]
    arrays = data.load(planned, ["tokens", "labels"])
    assert np.array_equal(arrays["tokens"][:, 1:], arrays["labels"][:, :-1])
    report = next(iter(config.trainer().steps(1)))
    assert report.loss == pytest.approx(np.log(64), abs=0.3)
    assert jax.tree.all(jax.tree.map(np.array_equal, arrays, data.load(planned, ["tokens", "labels"])))
