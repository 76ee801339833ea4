"""`rrfp compile`: what it refuses, what it says; and with XLA's compiler for GPUs, what it makes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from configs import quickstart
from rrfp_jax.forecast.devices import ACCELERATORS, TARGETS, target_text
from rrfp_jax.runtime.programs import compiler as absent
from rrfp_jax.runtime.programs.executables import ENDING
from rrfp_jax.train.compile_ahead import MadeFor, why_compiled
from tests.support.commands import compile_ahead as main
from tests.support.quickstart import ROOT

QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"
TINY = [QUICKSTART, "--config.model.d_model=32", "--config.model.d_ff=32", "--config.sequence_length=16"]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in absent.ENVIRONMENT:
        monkeypatch.setenv(name, "")


@pytest.fixture
def compiler_there(monkeypatch):
    monkeypatch.setattr(absent, "require_gpu_compiler", lambda: None)


def test_without_the_compiler_the_command_that_installs_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(absent, "PLUGINS", {"no_such_plugin": "cuda12"})
    assert main([QUICKSTART, "--card=h100"]) == 2
    assert f"pip install 'jax[cuda12]=={jax.__version__}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--card=cpu", "--card=cpu: choose one of a100-40, a100-80, h100"),
        ("--stages=a", "--stages=a: give numbers of stages, such as 0,1,7"),
        ("--stages=0,4", "--stages: there is no stage 4 of mesh.pp=4: give numbers from 0 to 3"),
        ("--processes=3", "every process takes equally many stages, so start 4, 2 or 1 processes"),
        ("--memory-share=2", "--memory-share=2: give a share above 0, at most 1"),
        ("--config.executables=none", "executables=none: the run keeps no programs; give --out=FOLDER"),
    ],
)
def test_refused(argument, says, compiler_there, capsys):
    card = [] if argument.startswith("--card") else ["--card=h100"]
    assert main([QUICKSTART, *card, argument]) == 2
    assert says in capsys.readouterr().err


def test_what_xla_cannot_compile_is_said_with_what_may_help(compiler_there, capsys, monkeypatch):
    def gives_up(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes\n\tSymbolic tile")

    monkeypatch.setattr("rrfp_jax.commands.compile.compile_run", gives_up)
    assert main([QUICKSTART, "--card=h100"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert (
        "XLA gives up: INTERNAL: Couldn't find output tile sizes; XLA_FLAGS=--xla_gpu_enable_triton" in said
    )


def test_targets_are_cards_that_plans_know_and_agree_with_their_sheets():
    assert TARGETS.keys() == ACCELERATORS.keys() - {"cpu"}
    for name, target in TARGETS.items():
        card = ACCELERATORS[name]
        assert target.bytes_per_second == pytest.approx(card.bytes_per_second, rel=0.05)
        assert target.memory == pytest.approx(card.memory, rel=0.08)
        text = target_text(card)
        assert text.count("{") == text.count("}") and f'"{card.kinds[0]}"' in text
        # A float32 unit multiplies and adds in a clock; what is left is made of matrix units.
        assert 2 * target.cores * target.architecture.fpus * target.clock_ghz * 1e9 < card.single


def test_a_run_says_why_it_finds_no_programs(tmp_path, monkeypatch):
    known = {"jax-cuda12-pjrt": "1.2.3"}
    monkeypatch.setattr("rrfp_jax.runtime.programs.executables.found_versions", lambda names: known)
    h100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    here = MadeFor.of(h100, 4, {})
    assert why_compiled(tmp_path, "quickstart", here) is None
    MadeFor.of(SimpleNamespace(platform="gpu", device_kind="NVIDIA H200"), 4, {}).write(
        tmp_path, "quickstart"
    )
    said = why_compiled(tmp_path, "quickstart", here)
    assert said.endswith("not all that it needs: device 'NVIDIA H200', here 'NVIDIA H100 80GB HBM3'")
    here.write(tmp_path, "quickstart")
    assert "the config, or this user's key" in why_compiled(tmp_path, "quickstart", here)
    (tmp_path / "ahead-quickstart.json").write_text("{}")
    assert "device is missing" in why_compiled(tmp_path, "quickstart", here)


@pytest.mark.skipif(
    not any(map(absent.is_there, absent.PLUGINS)), reason="XLA's compiler for GPUs is not installed"
)
def test_the_quickstart_for_an_h100(tmp_path):
    """In a process of its own, as JAX must not have been in use."""
    figures, folder = tmp_path / "figures.json", tmp_path / "programs"
    command = [sys.executable, "-m", "rrfp_jax", "compile", *TINY, "--card=h100", f"--json={figures}"]
    chosen = ["--stages=1,2", "--config.schedule=bfw", f"--out={folder}", f"--hlo={tmp_path / 'hlo'}"]
    flags = {"XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": ""}
    done = subprocess.run(
        [*command, *chosen], env=os.environ | flags, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart for NVIDIA H100 80GB HBM3: 4 devices of 4 processes" in done.stdout
    found = json.loads(figures.read_text())
    assert [own["stage"] for own in found["stages"]] == [1, 2]
    assert len(list(folder.glob(f"*{ENDING}"))) == found["programs"]  # those of equal stages are one
    for own in found["stages"]:
        for name, of_bucket in own["ledger"]["buckets"].items():
            (chunk,), (predicted,) = of_bucket["chunks"], own["predicted"]["buckets"][name]["chunks"]
            assert chunk["temporary_bytes"].keys() == {"F", "I", "W"}
            assert chunk["held_after_forward_bytes"] == predicted["held_after_forward_bytes"] > 0
    texts = {path.name for path in (tmp_path / "hlo").iterdir()}
    assert {f"stage-{s}-{name}.txt" for s in (1, 2) for name in ("F-bucket-0-segment-0", "update-0")} <= texts
    made = json.loads((folder / f"ahead-{quickstart.get_config().name}.json").read_text())
    assert made["device"] == "NVIDIA H100 80GB HBM3" and made["processes"] == 4
