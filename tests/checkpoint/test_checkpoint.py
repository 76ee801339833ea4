"""Checkpoints: complete or invisible, read by plain orbax, and resumed on another layout of stages."""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rrfp_jax.checkpoint.folder import CheckpointFolder, readable_checkpoints
from rrfp_jax.checkpoint.format import RunState, joined, read_leaf, tree_metadata, write_leaf
from rrfp_jax.checkpoint.leaves import Parts, filled, keyed, name_of
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.random_keys import plain_spec
from rrfp_jax.runtime.run.world import World
from tests.support import stored
from tests.support.stored import ALL, save, specs_of, whole
from tests.train.test_processes import command

pytestmark = pytest.mark.usefixtures("unsynced")


PLAIN_ORBAX = """
import hashlib, json, sys
import jax, orbax.checkpoint as ocp
tree = ocp.StandardCheckpointer().restore(sys.argv[1])
assert "rrfp_jax" not in sys.modules
leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
print(json.dumps({
    jax.tree_util.keystr(path, simple=True, separator="."):
    [str(leaf.dtype), list(leaf.shape), hashlib.sha256(leaf.tobytes()).hexdigest()]
    for path, leaf in leaves
}))
"""


def plain_orbax(folder):
    """What orbax alone restores in a fresh process: {name: [dtype, shape, hash of the values]}."""
    argv = [sys.executable, "-I", "-c", PLAIN_ORBAX, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def digests(leaves):
    found = {}
    for key, leaf in leaves:
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        found[name_of(key)] = [array.dtype.name, list(array.shape), digest]
    return found


def equal(found, leaves):
    assert found.keys() == dict(leaves).keys()
    return digests(found.items()) == digests(leaves)


class TestRoundTrip:
    def test_the_state_and_every_leaf_come_back(self, made):
        state = {
            "data": {"epoch": 2},
            "seed": 3,
            "standing": {"loss_scale": 2.0**15},
            "config": {"x": [1]},
            "plan_hash": "ab",
        }
        save(made(), 5, **state)
        found = made().restore(specs_of(stored.leaves(ALL, 5)))
        assert found.run == RunState(step=5, **state)
        assert equal(found.leaves, stored.leaves(ALL, 5))

    def test_there_is_none_at_first(self, made):
        assert made().restore(specs_of(stored.leaves(ALL, 0))) is None

    @pytest.mark.parametrize("optimizer", stored.OPTIMIZERS)
    def test_a_run_resumes_on_another_number_of_stages(self, made, optimizer):
        quarters = [range(i, i + 1) for i in ALL]
        leaves = [pair for layers in quarters for pair in stored.leaves(layers, 5, optimizer)]
        save(made(), 5, leaves)
        halves = [stored.specs(layers, optimizer) for layers in (range(2), range(2, 4))]
        found = made().restore(dict(keyed(halves[0]) + keyed(halves[1]))).leaves
        assert equal(found, leaves)
        for half in halves:
            tree = filled(half, found)
            assert jax.tree.structure(tree) == jax.tree.structure(half)
            kinds = [plain_spec(spec).dtype for spec in jax.tree.leaves(half)]
            assert [leaf.dtype for leaf in jax.tree.leaves(tree)] == kinds
            assert equal(dict(keyed(tree)), [(key, found[key]) for key, _ in keyed(half)])

    @pytest.mark.parametrize(
        "dtype",
        [
            "float32",
            "bfloat16",
            "float16",
            "float8_e4m3fn",
            "int4",
            "uint4",
            "int8",
            "int64",
            "uint32",
            "bool",
            "complex64",
        ],
    )
    @pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)], ids=str)
    def test_any_array(self, tmp_path, dtype, shape):
        array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3).astype(dtype)
        again = np.asarray(read_leaf(tmp_path, write_leaf(tmp_path, ("a", "b"), whole(array)).leaf))
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, shape, array.tobytes())

    def test_arrays_that_do_not_lie_in_order(self, tmp_path):
        array = np.arange(6).reshape(2, 3).T
        again = read_leaf(tmp_path, write_leaf(tmp_path, ("a",), whole(array)).leaf)
        assert np.array_equal(again, array)

    def test_cut_otherwise_when_it_is_read(self, tmp_path):
        """As tensors are by stages of more or fewer devices."""
        array = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)

        def parts(shape, places):
            return Parts(array.shape, array.dtype, shape, {p: cut(array, shape, p) for p in places})

        def cut(array, shape, place):
            return array[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, shape, strict=True))]

        own = [parts((4, 3), [(0, 0), (0, 1)]), parts((4, 3), [(1, 0), (1, 1)])]  # of two processes
        stored = [write_leaf(tmp_path, ("a",), one) for one in own]
        leaf = joined(stored)
        for shape, places in (((8, 6), [(0, 0)]), ((2, 6), [(1, 0), (3, 0)]), ((8, 2), [(0, 1)])):
            found = read_leaf(tmp_path, leaf, shape, places)
            assert found.arrays.keys() == set(places)
            assert all((found.arrays[p] == cut(array, shape, p)).all() for p in places)
        with pytest.raises(ValueError, match="there are only parts"):
            np.asarray(found)
        other = write_leaf(tmp_path, ("a",), parts((8, 6), [(0, 0)]))
        assert joined([*stored, other]) is None


class TestOrbax:
    @pytest.mark.slow(reason="2 s: a process; the test below has orbax")
    def test_plain_orbax_in_a_fresh_process_restores_every_leaf(self, made):
        kinds = ["float16", "float8_e4m3fn", "int4", "int64", "bool", "complex64"]
        more = [(("kinds", kind), np.arange(6).reshape(2, 3).astype(kind)) for kind in kinds]
        slashed = [(("kinds", f"50{sign}x"), np.full(3, 5.0)) for sign in ("/", "%", "%2F")]
        escaped = [(("kinds", f"50{sign}x"), np.full(3, 5.0)) for sign in ("%2F", "%25", "%252F")]
        leaves = stored.leaves(ALL, 5, "two")
        folder = made.folder / "5"
        staging = CheckpointFolder(made.folder).staging(5)
        staging.mkdir(parents=True)
        written = [
            write_leaf(staging, key, whole(np.asarray(leaf))).leaf for key, leaf in leaves + more + slashed
        ]
        merged = {name_of(leaf.key): leaf for leaf in written}
        CheckpointFolder(made.folder).commit(RunState(step=5), merged, keep=1)
        assert plain_orbax(folder) == digests(leaves + more + escaped)

    def test_its_own_files_of_the_same_tree_say_the_same(self, tmp_path):
        import orbax.checkpoint as ocp

        tree = {
            "a": {"0": np.ones((2, 3), np.float32)},
            "b": np.ones(4, ml_dtypes.bfloat16),
            "c": np.array(7),
        }
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
        ocp.Checkpointer(handler).save(tmp_path / "theirs", tree)
        (tmp_path / "ours").mkdir()
        for key, leaf in keyed(tree):
            write_leaf(tmp_path / "ours", key, whole(np.asarray(leaf)))
            theirs, ours = (
                json.loads((tmp_path / who / name_of(key) / "zarr.json").read_text())
                for who in ("theirs", "ours")
            )
            bits = {"name": "bytes", "configuration": {"endian": "little"}}
            names = {"name": "v2", "configuration": {"separator": "."}}
            own = {"chunk_key_encoding": names, "codecs": [bits, {"name": "crc32c"}]}
            assert ours == theirs | own
        theirs = json.loads((tmp_path / "theirs" / "_METADATA").read_text())
        ours = json.loads(tree_metadata([key for key, _ in keyed(tree)], {}))
        assert ours == theirs | {"custom_metadata": {}}

    @pytest.mark.slow(reason="4 s: orbax's own reader; test_a_damaged_checkpoint_is_refused has ours")
    @pytest.mark.parametrize(("size", "file"), [(40, "params.0.w/0.0"), (2**19, "params.0.w/0.0")])
    def test_it_finds_a_flipped_bit_and_a_missing_file(self, made, size, file):
        save(made(), 5, [(("params", "0", "w"), jnp.arange(2.0 * size).reshape(2, size))])
        assert plain_orbax(made.folder / "5")
        flip(made.folder / "5" / file)
        with pytest.raises(AssertionError, match=f"{file}.*Digest mismatch"):
            plain_orbax(made.folder / "5")
        (made.folder / "5" / file).unlink()
        with pytest.raises(AssertionError, match=f"{file}.* is missing"):
            plain_orbax(made.folder / "5")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class TestDamage:
    @pytest.mark.parametrize("how", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "missing"])
    @pytest.mark.parametrize(
        "file", ["rrfp.json", "_METADATA", "params.2.up/0.0", "optimizer.0.count/zarr.json"]
    )
    def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(self, made, file, how):
        for step in (10, 20):
            save(made(), step)
        how(made.folder / "20" / file)
        made.said.clear()
        found = made().restore(specs_of(stored.leaves(ALL, 0)))
        assert found.run.step == 10 and equal(found.leaves, stored.leaves(ALL, 10))
        if not (made.folder / "20" / "rrfp.json").exists():  # as if it were somebody else's folder
            assert not made.said and CheckpointFolder(made.folder).steps() == [10]
            return
        assert str(made.folder / "20") in made.said[0] and file in made.said[0] and "rejected" in made.said[0]
        assert CheckpointFolder(made.folder).steps() == [10, 20]

    def test_nothing_is_begun_anew_where_all_are_damaged(self, made):
        save(made(), 10)
        flip(made.folder / "10" / "rrfp.json")
        with pytest.raises(TrainingError, match="no checkpoint is intact"):
            made().restore(specs_of(stored.leaves(ALL, 0)))

    def test_where_the_wanted_one_is_damaged_the_others_are_named(self, made):
        for step in (10, 20, 30):
            save(made(), step)
        flip(made.folder / "20" / "rrfp.json")
        said = "the checkpoint of step 20 is not intact; others there: 10, 30$"
        with pytest.raises(TrainingError, match=said):
            made().restore(specs_of(stored.leaves(ALL, 0)), step=20)
        with pytest.raises(TrainingError, match=said):
            next(readable_checkpoints("test", made.folder / "20"))

    def test_one_that_was_never_completed_is_invisible(self, made):
        save(made(), 10)
        staging = CheckpointFolder(made.folder).staging(20)
        staging.mkdir()
        for key, leaf in stored.leaves(ALL, 20):
            write_leaf(staging, key, whole(np.asarray(leaf)))
        (made.folder / ".5.removed" / "params.0.up").mkdir(parents=True)  # nor is one half removed
        made.said.clear()
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.step == 10
        assert not made.said and staging.exists()  # somebody may be writing it
        assert CheckpointFolder(made.folder).tidy() == [staging]
        assert [path.name for path in made.folder.iterdir()] == ["10"]


class TestRefusals:
    def test_another_model_is_refused_with_the_leaves_named(self, made):
        save(made(), 10)
        wanted = specs_of(stored.leaves(ALL, 0))
        wanted["params", "3", "up"] = jax.ShapeDtypeStruct((8, 6), jnp.float32)
        wanted["params", "4", "up"] = wanted.pop(("params", "2", "up"))
        with pytest.raises(UsageError) as refused:
            made().restore(wanted)
        differ = "of another model: the parameters differ (it lacks params.4.up; its params.2.up is not in"
        assert differ in str(refused.value) and "; and 1 more)" in str(refused.value)

    def test_one_of_a_later_version(self, made):
        @dataclass(frozen=True)
        class Later(RunState):
            weather: str = "fair"

        checkpoints = made()
        checkpoints.save(Later(step=10), stored.leaves(ALL, 10))
        checkpoints.advance(to_the_end=True)
        with pytest.raises(UsageError, match=r"checkpoints/10 has weather, which this version"):
            made().restore(specs_of(stored.leaves(ALL, 0)))

    def test_a_step_of_which_there_is_none(self, made):
        save(made(), 10)
        with pytest.raises(UsageError, match=r"step 11; there are: 10"):
            made().restore(specs_of(stored.leaves(ALL, 0)), step=11)

    def test_stages_that_differ_in_what_they_share(self, made):
        with pytest.raises(TrainingError, match=r"optimizer\.0\.count belongs to no layer"):
            save(made(), 10, [(("optimizer", "0", "count"), jnp.int32(i)) for i in range(2)])

    @pytest.mark.parametrize("tree", [{"..": 1.0}, {"a.b": 1.0, "a": {"b": 2.0}}], ids=str)
    def test_names_that_cannot_be_stored(self, tree):
        with pytest.raises(UsageError, match="rename the parameter"):
            keyed(jax.tree.map(np.asarray, tree))

    def test_nonsense_as_settings(self, made):
        with pytest.raises(UsageError, match="on_error='panic': choose 'continue' or 'stop'"):
            made(on_error="panic")


@pytest.mark.costly(reason="a run of two processes")
def test_two_processes(tmp_path):
    """Each writes its own leaves; what one of them cannot write or read, none of them uses."""
    ranks = ("-n", 2, "-m", "tests.support.checkpoint_ranks", tmp_path)
    status, said = command("rrfp_jax", "launch", *ranks, folder=tmp_path)
    assert status == 0, said
    ranks = [json.loads((tmp_path / f"checkpoint-{rank}.json").read_text()) for rank in range(2)]
    folder = tmp_path / "checkpoints"
    for rank in ranks:
        assert rank["step"] == 20 and rank["equal"]
        assert "by rank 1" in rank["stopped"] and "No space left" in rank["stopped"]
    assert ranks[1]["said"] == []
    told = "\n".join(ranks[0]["said"])
    assert "step 30 cannot be written by rank 1" in told and "latest complete one is of step 20" in told
    assert f"{folder}/40 is rejected: {folder}/40/params.3.up/0.0 has other bytes" in told
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "40"]
    everything = stored.leaves(ALL, 20)
    assert plain_orbax(folder / "20") == digests(everything)
    assert equal(Checkpoints(folder, World()).restore(specs_of(everything)).leaves, everything)
