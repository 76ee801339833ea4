"""Stored executables: a second start compiles nothing; files that do not fit are not used."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec

from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs import executables
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.executables import LEVEL, Executables
from tests.support import programs, refusals, toy
from tests.train.test_processes import environment

pytestmark = pytest.mark.usefixtures("jax_keeps_nothing")


def start(folder):
    argv = [sys.executable, "-m", "tests.support.programs", str(folder)]
    return subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True)


def ended(process):
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(said)


def test_a_second_start_compiles_nothing(tmp_path):
    first, second = ended(start(tmp_path)), ended(start(tmp_path))
    assert first["compiled"] > 0 and second["compiled"] == 0
    assert first | {"compiled": 0} == second and second["said"] == []
    assert len(list(tmp_path.iterdir())) == 2


def test_many_may_store_the_same_program_at_once(tmp_path):
    device = jax.devices()[0]

    def store(_):
        said = []
        compiled = Executables(tmp_path, say=said.append).compiled(programs.lowered(device), [device])
        return programs.result(compiled, device), said

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(store, range(24)))
    assert found == [found[0]] * 24 and found[0][1] == []
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow(reason="a process that compiles twice")
def test_a_program_from_the_cache_of_jax_is_not_stored(tmp_path):
    """It could not be loaded again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    programs.run(None)
    jax.clear_caches()
    found = programs.run(tmp_path / "ours")
    assert not (tmp_path / "ours").exists() and found["results"] == programs.run(None)["results"]


@pytest.mark.parametrize("kept", [False, True])
def test_programs_that_differ_in_a_python_function_only(tmp_path, kept):
    said, spec = [], jax.ShapeDtypeStruct((3,), np.float32)
    compiler = Compiler(
        StageMesh((jax.devices()[0],)), Executables(tmp_path if kept else None, say=said.append)
    )

    def scaled(factor):
        return compiler(lambda x: jax.pure_callback(lambda a: np.float32(factor) * a, spec, x), spec)

    one = jax.device_put(np.ones(3, np.float32), jax.devices()[0])
    assert [float(scaled(factor)(one)[0]) for factor in (1, 5, 7)] == [1, 5, 7]
    assert said == [] and not list(tmp_path.iterdir())


def test_what_failed_is_tried_again(monkeypatch):
    store, device = Executables(), jax.devices()[0]
    with monkeypatch.context() as broken:
        broken.setattr(store, "_obtain", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.compiled(programs.lowered(device), [device])
    assert programs.result(store.compiled(programs.lowered(device), [device]), device)


@pytest.fixture
def filled(tmp_path):
    """A folder with the programs of `programs.run`: two, each for two devices."""
    assert programs.run(tmp_path)["compiled"] == 2
    assert programs.run(tmp_path)["compiled"] == 0
    return tmp_path


def truncate(files):
    files[0].write_bytes(files[0].read_bytes()[:-1])


def flip(files):
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)


def exchange(files):
    files[0].write_bytes(files[1].read_bytes())


def empty(files):
    files[0].write_bytes(b"")


@pytest.mark.parametrize("how", [truncate, flip, exchange, empty])
def test_a_damaged_or_foreign_file_is_said_and_replaced(filled, how):
    files = sorted(filled.iterdir())
    how(files)
    found = programs.run(filled)
    assert found["compiled"] == 1
    assert [files[0].name in line and "compiled anew" in line for line in found["said"]] == [True]
    assert found["results"] == programs.run(None)["results"]
    assert programs.run(filled)["compiled"] == 0


def test_other_flags_are_another_program(filled):
    other = {**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    assert programs.run(filled, environment=other)["compiled"] == 2


def test_a_setting_of_the_compiler_is_another_program(filled):
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        assert programs.run(filled)["compiled"] == 2
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def test_where_nothing_can_be_written_programs_are_compiled(tmp_path):
    (tmp_path / "file").touch()
    found = programs.run(tmp_path / "file" / "folder")
    assert found["compiled"] == 2 and len(found["said"]) == 1
    assert "is not stored: Not a directory" in found["said"][0]


def test_programs_that_differ_in_their_device_only_are_compiled_once():
    said, devices = [], jax.devices()[:3]
    store = Executables(say=said.append)
    compiled = [store.compiled(programs.lowered(device), [device]) for device in devices]
    assert (store.compiles, store.loads, said) == (1, 2, [])
    alone = [Executables().compiled(programs.lowered(device), [device]) for device in devices]
    for one, other, device in zip(compiled, alone, devices, strict=True):
        assert programs.result(one, device) == programs.result(other, device)
        assert one.runtime_executable().local_devices() == [device]
        assert str(one.memory_analysis()) == str(other.memory_analysis())


def test_a_program_of_a_mesh_runs_on_other_devices_in_another_order():
    store, devices, found = Executables(), jax.devices(), []
    for own in (devices[:2], [devices[3], devices[2]]):
        compiler = Compiler(StageMesh(tuple(own)), store)
        spread = compiler.stage_mesh.sharding(PartitionSpec("tp"))
        spec = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=spread)
        rows = compiler.stage_mesh.put(np.arange(6, dtype=np.float32).reshape(2, 3), spread)
        summed, same = compiler(lambda x: [x.sum(0), x + 1], spec, out=[None, spread])(rows)
        assert [shard.device for shard in same.addressable_shards] == own
        assert np.array_equal(summed, [3, 5, 7]) and np.array_equal(same, rows + 1)
        found.append((store.compiles, store.loads))
    assert found == [(1, 0), (1, 1)]


def test_many_may_ask_for_equal_programs_at_once():
    store, devices = Executables(), jax.devices()
    with ThreadPoolExecutor(8) as pool:
        asked = [devices[i % len(devices)] for i in range(16)]
        found = list(pool.map(lambda d: store.compiled(programs.lowered(d), [d]), asked))
    assert (store.compiles, store.loads) == (1, len(devices) - 1)
    assert len(set(map(id, found))) == len(devices)


@pytest.mark.parametrize("breaks", ["raises", "runs elsewhere"])
def test_where_a_program_cannot_be_taken_over_it_is_compiled_and_that_is_said_once(monkeypatch, breaks):
    def load_for(content, made_for, devices):
        if breaks == "raises":
            raise KeyError("no such device")
        return serialize_executable.deserialize_and_load(*content, execution_devices=jax.devices()[:1])

    monkeypatch.setattr(executables, "load_for", load_for)
    said, devices = [], jax.devices()[:3]
    store = Executables(say=said.append)
    compiled = [store.compiled(programs.lowered(device), [device]) for device in devices]
    assert (store.compiles, store.loads, len(said)) == (3, 0, 2 if breaks == "runs elsewhere" else 1)
    assert all("it is compiled anew" in line for line in said)
    assert all(programs.result(one, device) for one, device in zip(compiled, devices, strict=True))


@pytest.fixture
def asked(monkeypatch):
    """The options of every program that is compiled."""
    options, plain = [], jax.stages.Lowered.compile

    def compile(lowered, asked=None):
        options.append(asked)
        return plain(lowered, asked)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return options


def test_what_runs_once_is_compiled_with_options_that_the_compiler_has(monkeypatch, asked):
    device, said = jax.devices()[0], []
    roughly = {LEVEL: 0, "no_such_option": 1}
    monkeypatch.setitem(executables.CPU_OPTIONS, "roughly", roughly)
    store = Executables(environment={}, say=said.append)
    found = store.compiled(programs.lowered(device), [device], "roughly")
    assert programs.result(found, device) and store.compiles == 1
    assert asked == [roughly, {LEVEL: 0}] and said == []
    assert store.compiled(programs.lowered(device), [device]) is not found
    assert asked[2:] == [{}]


def test_what_runs_once_keeps_its_bits(monkeypatch, asked):
    """Below XLA's own level, 3, a hundred values are added in another order."""
    device, values = jax.devices()[0], np.random.default_rng(0).standard_normal((7, 100)).astype(np.float32)
    monkeypatch.setitem(executables.CPU_OPTIONS, "steps", {LEVEL: 3})
    store = Executables(environment={})

    def adds_nothing(a):
        return jax.scipy.special.erfinv(jax.numpy.tanh(a)) * 1.7

    for function in (jax.nn.softmax, adds_nothing):
        lowered = jax.jit(function, keep_unused=True).lower(values)
        found = [store.compiled(lowered, [device], effort)(values) for effort in ("steps", "once")]
        assert np.array_equal(*found)
    assert [options[LEVEL] for options in asked][:3] == [3, 3, 1]  # the first two are one program


def test_a_flag_or_setting_of_the_users_is_left_alone(asked):
    device, flags = jax.devices()[0], {"XLA_FLAGS": f"--a=b --{LEVEL}=2"}
    Executables(environment=flags).compiled(programs.lowered(device), [device], "roughly")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        Executables(environment={}).compiled(programs.lowered(device), [device], "roughly")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert len(asked) >= 2 and not any(LEVEL in options for options in asked)


@pytest.mark.slow(reason="two Trainers that compile without a cache")
def test_a_step_is_equal_to_the_bit_whether_programs_are_taken_over_or_compiled(monkeypatch):
    def step():
        trainer = toy.trainer(4, data=refusals.BATCH)
        loss, gradient = trainer.value_and_grad(refusals.BATCH)
        return trainer._engine.executables, [loss, *map(np.asarray, jax.tree.leaves(gradient))]

    taken, found = step()
    with monkeypatch.context() as patched:
        patched.setattr(executables, "load_for", lambda *_: 1 / 0)
        compiled, expected = step()
    assert taken.loads > 0 and compiled.loads == 0
    assert taken.compiles + taken.loads == compiled.compiles
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def lowered(monkeypatch):
    """The name of every program that is lowered."""
    names, plain = [], jax.stages.Traced.lower

    def lower(traced, **options):
        names.append(traced.fun_name)
        return plain(traced, **options)

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    return names


def test_of_equal_programs_one_is_lowered_and_none_that_differs_is_taken_for_equal(lowered):
    store, ones = Executables(), np.ones((3, 3), np.float32)

    def result(constant, number, device, called=None):
        def program(a):
            if called is not None:
                jax.debug.callback(called, a[0, 0])
            return jax.nn.relu(a * number + constant @ a)

        made = Compiler(StageMesh((device,)), store)(program, ones)(jax.device_put(ones, device))
        return float(made[0, 0])

    here, there = jax.devices()[:2]
    assert [result(one, 2.0, device) for one in (ones, ones.copy()) for device in (here, there)] == [5.0] * 4
    assert lowered == ["program"]
    assert [result(ones, 3.0, here), result(2 * ones, 2.0, here)] == [6.0, 8.0]
    told = [], []
    assert [result(ones, 2.0, here, own.append) for own in told] == [5.0] * 2
    jax.effects_barrier()
    assert len(lowered) == 5 and [list(map(float, own)) for own in told] == [[1.0]] * 2
