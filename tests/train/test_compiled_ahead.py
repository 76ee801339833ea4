"""Programs compiled without a run's devices: a start finds them, and they say what it needs."""

import dataclasses
from types import SimpleNamespace

import jax
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.data.contract import as_data
from rrfp_jax.forecast.forecast import RunSpec
from rrfp_jax.runtime.programs.executables import ENDING, Executables, Request
from rrfp_jax.train.compile_ahead import compile_ahead
from rrfp_jax.train.named import schedule_of
from tests.support import programs, toy
from tests.support.refusals import BATCH
from tests.support.toy import made

pytestmark = pytest.mark.usefixtures("jax_keeps_nothing")

DATA = [*BATCH, BATCH[0]]  # 4 microbatches
OPTIMIZER = optax.adamw(1e-3)
MESHES = {
    "tied, split backward": (rrfp.Mesh(pp=2), "bfw", toy.tied_pipeline),
    "tp, dp": (rrfp.Mesh(pp=1, tp=2, dp=2), "bf", toy.pipeline),
    "equal chunks of several devices": (rrfp.Mesh(pp=2, tp=2, chunks=2), "bf", toy.pipeline),
}


def compiled(mesh, schedule, pipe, folder, stages=None, memory=None, here=False, **more):
    settings = made(pipe, OPTIMIZER, mesh=mesh, schedule=schedule, **more)._stepper.settings
    run = RunSpec(
        pipe=pipe,
        optimizer=OPTIMIZER,
        data=as_data(DATA),
        evaluate=as_data(DATA),
        mesh=mesh,
        schedule=schedule_of(schedule),
        split=None,
        settings=settings,
    )
    devices = [jax.devices()[: mesh.devices]]
    stages = range(mesh.pp) if stages is None else stages
    return compile_ahead(run, devices, stages, memory, Executables(folder, here=here))


@pytest.mark.parametrize(
    "name",
    [
        *("tied, split backward", "tp, dp"),
        pytest.param("equal chunks of several devices", marks=pytest.mark.slow(reason="5 s; others: less")),
    ],
)
def test_a_start_compiles_nothing_and_says_the_same(name, tmp_path):
    mesh, schedule, pipe = MESHES[name]
    ahead = compiled(mesh, schedule, pipe(), tmp_path)
    assert ahead.programs == len(list(tmp_path.glob(f"*{ENDING}"))) > 0  # equal ones once
    trainer = rrfp.Trainer(pipe(), OPTIMIZER, data=DATA, mesh=mesh, schedule=schedule, executables=tmp_path)
    ledgers = trainer.start(DATA)
    assert trainer._programs[0] == 0 < trainer._programs[1]
    found = [own.ledger for own in ahead.stages]
    unlike = {"compile_seconds": 0.0, "device": ""}
    assert [dataclasses.replace(own, **unlike) for own in found] == [
        dataclasses.replace(own, **unlike) for own in ledgers
    ]


@pytest.mark.slow(reason="2 s")
def test_what_does_not_fit_is_said(tmp_path):
    mesh, schedule, pipe = MESHES["tied, split backward"]
    refusal = compiled(mesh, schedule, pipe(), tmp_path, memory=20_000).refusal
    assert refusal is not None and "activation_budget=auto: stage" in refusal


@pytest.mark.slow(reason="3 s")
def test_both_halves_of_a_backward_that_stands_for_a_whole_one_have_texts(tmp_path):
    ahead = compiled(rrfp.Mesh(pp=2), "bf", toy.pipeline(), tmp_path, equal_schedules=True)
    for own in ahead.stages:
        kinds = {name.split("-")[2] for name in own.texts() if "bucket" in name}
        assert kinds == {"F", "I", "W"}


def test_programs_for_absent_devices_are_stored_and_not_loaded(tmp_path):
    said, device = [], jax.devices()[0]
    for _ in range(2):
        store = Executables(tmp_path, say=said.append, here=False)
        for other in jax.devices()[:2]:
            store.compiled(programs.lowered(other), [other])
        assert (store.compiles, store.loads) == (1, 0)
    (file,) = tmp_path.glob(f"*{ENDING}")
    store = Executables(tmp_path, say=said.append)
    programs.result(store.compiled(programs.lowered(device), [device]), device)
    assert (store.compiles, store.loads, said) == (0, 1, []) and file.exists()


def gpu(told, process=0):
    client = SimpleNamespace(platform_version=told)
    known = {"platform": "gpu", "device_kind": "some card", "client": client}
    return SimpleNamespace(**known, process_index=process, id=process)


def test_keys_are_those_of_devices_that_are_there(monkeypatch):
    """A client of absent GPUs says other things of itself; CPU flags are of no concern to a GPU."""
    lowered = programs.lowered(jax.devices()[0])
    known = {"jax-cuda12-pjrt": "1.2.3"}
    monkeypatch.setattr("rrfp_jax.runtime.programs.executables.found_versions", lambda names: known)
    absent = Request(lowered, [gpu("PJRT C API\nsome card", process=3)])
    there = Request(lowered, [gpu("PJRT C API\ncuda 12090")])
    flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_gpu_deterministic_ops=true"}
    assert absent.kind(flags) == there.kind({"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"})
    assert absent.kind(flags) != there.kind({})
    two = Request(lowered, [gpu("", 0), gpu("", 1)]), Request(lowered, [gpu("", 1), gpu("", 2)])
    assert two[0].kind({}) != two[1].kind({})
