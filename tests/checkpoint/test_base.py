"""Frozen parameters that an `init` reads from files: checkpoints leave them out, and a resume checks them."""

import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import rrfp_jax as rrfp
from rrfp_jax.checkpoint.format import METADATA
from rrfp_jax.commands.cli import main
from rrfp_jax.train import base as train_base
from tests.support.decided_moves import forgets_its_engine

LAYERS, WIDTH = 4, 4
BASES = [f"params.{layer}.base" for layer in range(LAYERS)]


def dense(params, x, mb):
    return jnp.tanh((mb["x"] if x is None else x) @ (params["base"] + params["own"]))


def own_values(key):
    return {"base": jax.random.normal(key, (WIDTH, WIDTH)), "own": jnp.zeros((WIDTH, WIDTH))}


def pipeline(frozen="*.base", layers=LAYERS, dtype=jnp.float32):
    def init(key):
        values = own_values(key)
        return {**values, "base": values["base"].astype(dtype)}

    specs = [rrfp.layer(dense, init=init, repeat=layers)]
    return rrfp.Pipeline(specs, lambda x, mb: rrfp.Loss(((x - 0.5) ** 2).sum(), weight=x.size), frozen=frozen)


def data(step):
    return [{"x": np.random.default_rng((step, j)).normal(size=(2, WIDTH))} for j in range(4)]


def trainer(init=None, stages=2, **kwargs):
    return rrfp.Trainer(pipeline(**kwargs), optax.adam(1e-2), data=data, mesh=rrfp.Mesh(pp=stages), init=init)


def tensors(seed=0):
    draw = np.random.default_rng(seed)
    return {str(i): draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) for i in range(LAYERS)}


def name_in_file(path):
    layer, _, name = path.partition(".")
    return layer if name == "base" else None


def init_of(file):
    return rrfp.weights.pretrained(file, name_in_file)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    file = tmp_path_factory.mktemp("base") / "model.safetensors"
    save_file(tensors(), file)
    return file


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """The folder of a run's checkpoints, after two steps, and the losses of the two that followed."""
    folder, own = tmp_path_factory.mktemp("checkpoints"), trainer(init_of(base))
    list(own.steps(2))
    own.save(folder)
    return folder, [report.loss for report in own.steps(2)]


def stored(folder, step=2):
    return {path.name for path in (folder / str(step)).iterdir() if path.is_dir()}


def test_only_what_is_trained_is_kept(saved, base):
    import orbax.checkpoint as ocp  # takes long, and every worker imports this file

    folder, _ = saved
    names = stored(folder)
    assert {name for name in names if name.startswith("params")} == {f"params.{i}.own" for i in range(LAYERS)}
    assert not any("base" in name for name in names)
    told = json.loads((folder / "2" / METADATA).read_text())["custom_metadata"]["base"]
    assert told["files"] == [str(base)] and sorted(told["sha256"]) == [f"{i}.base" for i in range(LAYERS)]
    assert ocp.StandardCheckpointer().restore(folder / "2")["params"]["0"].keys() == {"own"}


@pytest.mark.parametrize("stages", [1, 4])
def test_it_resumes_to_the_bit_with_the_same_base_wherever_that_lies(saved, base, tmp_path, stages):
    folder, losses = saved
    moved = tmp_path / "elsewhere.safetensors"
    moved.write_bytes(base.read_bytes())
    own = trainer(init_of(moved), stages)
    assert own.restore(folder)
    assert [report.loss for report in own.steps(2)] == losses
    own.save(tmp_path / "again")
    assert not stored(tmp_path / "again", 4) & {*BASES}


@pytest.mark.parametrize("params_only", [False, True])
def test_a_changed_base_is_refused(saved, tmp_path, params_only):
    changed = tensors()
    changed["2"][0, 0] += 1
    save_file(changed, tmp_path / "new.safetensors")
    own = trainer(init_of(tmp_path / "new.safetensors"))
    said = (
        r"2 leaves out 4 frozen parameters, such as 0.base, which were read from .*model.safetensors; now "
        r".*new.safetensors has other values of 1 of them, such as 2.base: give the files and the"
    )
    with pytest.raises(rrfp.UsageError, match=said):
        own.restore(saved[0], params_only=params_only)


@pytest.mark.parametrize("frozen", ["*.base", ()])
def test_a_trainer_that_does_not_read_the_base_is_refused(saved, base, frozen, capsys):
    init = None if frozen else init_of(base)
    own = trainer(init, frozen=frozen)
    with pytest.raises(rrfp.UsageError, match=r"leaves out 4|of another optimizer"):
        own.restore(saved[0])
    assert not own._engine.stages, "before anything is compiled"
    own = trainer(None, frozen=frozen)
    with pytest.raises(
        rrfp.UsageError, match=r"leaves out 4 .* an init= that reads them, and to resume freeze"
    ):
        own.restore(saved[0], params_only=True)


def test_another_model_is_refused(saved, base):
    own = trainer(init_of(base), layers=LAYERS - 1)
    with pytest.raises(rrfp.UsageError, match=r"of another model: it leaves out params\.3\.base"):
        own.restore(saved[0])


def test_parameters_alone(saved, base):
    own = trainer(init_of(base))
    own.restore(saved[0], params_only=True)
    found = own.params()
    assert np.array_equal(found[3]["base"], tensors()["3"]) and np.asarray(found[3]["own"]).any()


@pytest.mark.slow(reason="2 s: two Trainers")
def test_parameters_alone_for_full_fine_tuning_after_adapters(saved, base, tmp_path):
    """What was frozen is trained from its values in the files, and checkpoints keep it from then on."""
    own = trainer(init_of(base), frozen=())
    own.restore(saved[0], params_only=True)
    before = own.params()
    assert np.array_equal(before[3]["base"], tensors()["3"]) and np.asarray(before[3]["own"]).any()
    list(own.steps(1))
    assert not np.array_equal(own.params()[3]["base"], tensors()["3"])
    own.save(tmp_path / "full")
    assert {*BASES} <= stored(tmp_path / "full", 1)
    again = trainer(frozen=())
    assert again.restore(tmp_path / "full")


@pytest.mark.slow(reason="a Trainer; test_a_changed_base_is_refused has values")
def test_a_base_in_another_dtype_is_told_as_that(saved, base):
    own = trainer(init_of(base), dtype=jnp.float16)
    said = r"model.safetensors; 0.base was float32 there and is float16 here: give the frozen parameters"
    with pytest.raises(rrfp.UsageError, match=said):
        own.restore(saved[0])


@pytest.mark.slow(reason="a Trainer of its own")
def test_nothing_is_hashed_before_a_checkpoint(base, tmp_path, monkeypatch):
    """A thread of the checkpoint does it then, once."""
    threads = []

    def digest(value):
        threads.append(threading.current_thread().name)
        return real(value)

    real = train_base._digest
    monkeypatch.setattr(train_base, "_digest", digest)
    own = trainer(init_of(base))
    list(own.steps(2))
    assert not threads
    for number in range(2):
        own.save(tmp_path / str(number))
    assert len(threads) == LAYERS and not any(name == "MainThread" for name in threads)


@pytest.mark.slow(reason="2 s: two Trainers")
def test_values_that_a_checkpoint_has_given_are_kept(base, tmp_path):
    """They may be others than the files have."""
    first = trainer()
    first.start()
    first.save(tmp_path / "first")
    assert {*BASES} <= stored(tmp_path / "first", 0)
    own = trainer(init_of(base))
    own.restore(tmp_path / "first")
    own.save(tmp_path / "second")
    assert {*BASES} <= stored(tmp_path / "second", 0)


@pytest.mark.slow(reason="4 s: five Trainers")
def test_what_another_run_has_is_kept(saved, base, tmp_path):
    """Its checkpoints may go; and so is what a function has made, and what is trained."""
    whole = trainer()
    whole.start()
    whole.save(tmp_path / "whole")
    of_run = rrfp.weights.checkpoint(tmp_path / "whole")
    inits = [
        (of_run, "*.base"),
        (rrfp.weights.together(of_run, init_of(base)), "*.base"),
        (lambda path, spec: np.ones(spec.shape, spec.dtype), "*.base"),
        (init_of(base), ()),
    ]
    for number, (init, frozen) in enumerate(inits):
        own = trainer(init, frozen=frozen)
        own.start()
        own.save(tmp_path / str(number))
        assert {*BASES} <= stored(tmp_path / str(number), 0), number
        assert (
            "base" not in json.loads((tmp_path / str(number) / "0" / METADATA).read_text())["custom_metadata"]
        )


@pytest.mark.slow(reason="a Trainer of its own")
def test_of_several_files_all_are_named(base, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"3": tensors()["3"]}, other)
    last = rrfp.weights.pretrained(other, lambda path: name_in_file(path) if path[0] == "3" else None)
    own = trainer(rrfp.weights.together(last, init_of(base)))
    own.start()
    own.save(tmp_path / "saved")
    told = json.loads((tmp_path / "saved" / "0" / METADATA).read_text())["custom_metadata"]["base"]
    assert told["files"] == sorted([str(base), str(other)])


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_tied_base_is_left_out_under_all_its_names(base, tmp_path):
    pipe = pipeline()
    pipe.tied = [("0.base", "3.base")]
    made = rrfp.Trainer(pipe, optax.adam(1e-2), data=data, mesh=rrfp.Mesh(pp=2), init=init_of(base))
    made.start()
    made.save(tmp_path / "tied")
    assert not stored(tmp_path / "tied", 0) & {*BASES}
    assert made.restore(tmp_path / "tied")
    with pytest.raises(rrfp.UsageError, match=r"3\.base was equal to 0\.base there: if tied, tie them"):
        trainer(init_of(base)).restore(tmp_path / "tied")


@pytest.mark.slow(reason="2 s: two Trainers; test_what_was_not_tied_is_tied_now has ties")
def test_a_tie_to_what_was_left_out_takes_its_value(base, tmp_path):
    untied = trainer(init_of(base), frozen="0.base")
    untied.start()
    untied.save(tmp_path / "untied")
    pipe = pipeline(frozen="0.base")
    pipe.tied = [("0.base", "3.base")]
    made = rrfp.Trainer(pipe, optax.adam(1e-2), data=data, mesh=rrfp.Mesh(pp=2), init=init_of(base))
    made.restore(tmp_path / "untied", params_only=True)
    assert np.array_equal(made.params()[3]["base"], tensors()["0"])


def test_a_checkpoint_to_begin_with_says_what_it_leaves_out(saved):
    with pytest.raises(rrfp.UsageError, match=r"0\.base: no tensor .* \(which leaves out what was read"):
        trainer(rrfp.weights.checkpoint(saved[0]))


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_no_engine_is_kept_once_layers_have_moved(base):
    assert forgets_its_engine(trainer(init_of(base)), [1, 3])


def test_export_says_where_the_rest_is(saved, tmp_path, capsys):
    with pytest.raises(
        rrfp.UsageError, match=r"leaves out 4 frozen .* restore it in a Trainer whose init= reads"
    ):
        rrfp.export(saved[0])
    assert main(["export", str(saved[0]), f"--to={tmp_path / 'public'}", "--as=qwen3"]) == 2
    assert re.search("--as=qwen3: .* leaves out 4 frozen parameters", capsys.readouterr().err)
    assert main(["export", str(saved[0]), f"--to={tmp_path / 'own'}"]) == 0
    assert load_file(tmp_path / "own" / "model.safetensors").keys() == {f"{i}.own" for i in range(LAYERS)}
