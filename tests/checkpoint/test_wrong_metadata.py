"""Checkpoints whose small files are sealed, but wrong: refused by name, and the one before is tried."""

import json
import os
import re
import shutil
import zlib
from dataclasses import asdict

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rrfp_jax as rrfp
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import Damaged, RunState
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.loss_scale import LossScale
from rrfp_jax.runtime.run.world import World
from rrfp_jax.train.resume import TrainingState, state_of
from tests.support.mutations import changed_bytes, changed_trees
from tests.support.stored import rewrite
from tests.support.wrong_metadata import (
    LEAF,
    MANIFESTS,
    METADATA,
    OTHER_MODELS,
    SEALS,
    TEXTS,
    TODAYS_MANIFESTS,
    change,
    of_state,
    reseal,
)

STATE = {
    "standing": asdict(TrainingState(loss_scale=LossScale())),
    "plan_hash": "ab",
    "config": {"rate": 0.1},
}


def leaves(step):
    values = {
        ("params", "0", "w"): jnp.full((4, 2), step, jnp.float32),
        ("optimizer", "count"): jnp.int32(step),
    }
    return list(values.items())


WANTED = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves(0)}


@pytest.fixture(scope="module", params=["today", "first"])
def saved(request, tmp_path_factory):
    """Checkpoints of steps 10 and 20, in the form of today or of the first versions."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, World(), say=lambda text: None)
    for step in (10, 20):
        checkpoints.save(RunState(step=step, **STATE), leaves(step))
        checkpoints.advance(to_the_end=True)
        if request.param == "first":
            rewrite(folder, step)
    return folder


@pytest.fixture
def first(saved):
    """Whether they are in the form of the first versions."""
    return not list(saved.rglob("zarr.json"))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of them, to be spoilt."""
    return shutil.copytree(saved, tmp_path / "copy")


def restored(folder):
    """The step that is gone on from, and what was said."""
    said = []
    found = Checkpoints(folder, World(), say=said.append).restore(WANTED, check=state_of)
    assert np.array_equal(np.asarray(found.leaves["params", "0", "w"]), np.full((4, 2), found.run.step))
    return found.run.step, said


def passed_over(folder, *parts):
    step, said = restored(folder)
    assert step == 10 and len(said) == 1, said
    assert said[0].startswith(f"the checkpoint {folder / '20'} is rejected: {folder / '20'}/"), said
    assert said[0].isprintable() and len(said[0]) < 1500
    assert all(part in said[0] for part in parts), said


def test_what_nobody_has_changed_is_read(folder):
    reseal(folder / "20")
    assert restored(folder) == (20, [])


@pytest.mark.parametrize("case", SEALS)
def test_a_manifest_with_another_seal(folder, case):
    seal, said = SEALS[case]
    reseal(folder / "20", seal=seal)
    passed_over(folder, "rrfp.json", said)


@pytest.mark.parametrize("case", {**MANIFESTS, **TODAYS_MANIFESTS})
def test_a_manifest_with_another_content(folder, first, case):
    cases = MANIFESTS if first else TODAYS_MANIFESTS
    if case not in cases:
        return
    manifest, said = cases[case]
    reseal(folder / "20", manifest=manifest)
    passed_over(folder, said)


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_manifest_of_another_model(folder, first, case):
    if not first:
        manifest, said = OTHER_MODELS[case]
        reseal(folder / "20", manifest=manifest)
        with pytest.raises(rrfp.UsageError, match=f"20 is of another model: .*{re.escape(said)}"):
            restored(folder)


@pytest.mark.parametrize("case", METADATA)
def test_a_state_that_nobody_could_go_on_from(folder, case):
    metadata, said = METADATA[case]
    reseal(folder / "20", metadata=metadata)
    passed_over(folder, "_METADATA", said)


def test_what_a_later_version_knows_is_no_damage(folder):
    reseal(folder / "20", metadata=of_state("weath\x1ber", 1))
    with pytest.raises(
        rrfp.UsageError, match=r"20 has weath\\x1ber, which this version of rrfp_jax does not"
    ):
        restored(folder)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def subfolder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, device, subfolder])
@pytest.mark.parametrize("name", ["rrfp.json", "_METADATA", f"{LEAF}/header", f"{LEAF}/0.0"])
def test_what_is_no_file_is_not_read(folder, first, name, make):
    path = folder / "20" / name.replace("header", ".zarray" if first else "zarr.json")
    path.unlink()
    make(path)
    passed_over(folder, f"{path} cannot be read: it is no file, but a folder, a pipe or a device")


@pytest.mark.parametrize("case", TEXTS)
def test_a_manifest_that_is_no_manifest(folder, case):
    text, said = TEXTS[case]
    (folder / "20" / "rrfp.json").write_bytes(text)
    passed_over(folder, "rrfp.json", said)


def test_metadata_that_is_sealed_garbage(folder):
    (folder / "20" / "_METADATA").write_text("[" * 10**5)
    content = json.loads((folder / "20" / "rrfp.json").read_text())["content"]
    content["files"]["_METADATA"] = [10**5, zlib.crc32(b"[" * 10**5)]
    sealed = {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    (folder / "20" / "rrfp.json").write_text(json.dumps(sealed))
    passed_over(folder, "_METADATA: nested too deeply")


@pytest.mark.parametrize("name", ["020", "٢٠", "+20", "20.0", "1e3", "9" * 100, ".20.saved"])
def test_what_is_named_otherwise_is_no_checkpoint(folder, name):
    (folder / name).mkdir()
    assert CheckpointFolder(folder).steps() == [10, 20]


@pytest.fixture(scope="module")
def scratch(saved, tmp_path_factory):
    """A copy of the checkpoints whose small files are written anew for every example."""
    return shutil.copytree(saved, tmp_path_factory.mktemp("scratch") / "copy")


class TestMutations:
    """No traceback, and nothing is taken for what it is not: what is read is what the files say."""

    EXAMPLES = settings(max_examples=400, deadline=None, derandomize=True)

    @EXAMPLES
    @given(data=st.data())
    def test_of_a_manifest(self, saved, scratch, data):
        intact, _ = CheckpointFolder(saved).open(20)
        content = json.loads((saved / "20" / "rrfp.json").read_text())["content"]
        changed = data.draw(changed_trees(content))
        (scratch / "20" / "rrfp.json").write_text(
            json.dumps({"crc32": zlib.crc32(json.dumps(changed).encode()), "content": changed})
        )
        (scratch / "20" / "_METADATA").write_bytes((saved / "20" / "_METADATA").read_bytes())
        found = opened(scratch)
        if found is not None:
            run, leaves = found
            plain = json.loads(json.dumps(msgspec.to_builtins(leaves)))
            assert run == intact
            absent = {"part": None, "piece": None, "files": {}}
            assert plain == {name: absent | leaf for name, leaf in changed["leaves"].items()}

    @EXAMPLES
    @given(data=st.data())
    def test_of_a_state(self, saved, scratch, data):
        (scratch / "20" / "rrfp.json").write_bytes((saved / "20" / "rrfp.json").read_bytes())
        tree = json.loads((saved / "20" / "_METADATA").read_text())
        state = data.draw(changed_trees(tree["custom_metadata"]))
        (scratch / "20" / "_METADATA").write_text(json.dumps(tree))
        reseal(scratch / "20", metadata=change("custom_metadata", to=state))
        found = opened(scratch)
        if found is not None:
            expected = {"layers": [], "base": None, **state}  # which the first versions did not have
            assert json.dumps(asdict(found[0]), sort_keys=True) == json.dumps(expected, sort_keys=True)

    @EXAMPLES
    @given(data=st.data())
    def test_of_bytes(self, saved, scratch, data):
        name = data.draw(st.sampled_from(["rrfp.json", "_METADATA"]))
        for own in ("rrfp.json", "_METADATA"):
            (scratch / "20" / own).write_bytes((saved / "20" / own).read_bytes())
        (scratch / "20" / name).write_bytes(data.draw(changed_bytes((saved / "20" / name).read_bytes())))
        found = opened(scratch)
        assert found is None or found == CheckpointFolder(saved).open(20)


def opened(folder):
    """The checkpoint of step 20; None if it is refused, in a sentence that names a file of it."""
    try:
        return CheckpointFolder(folder).open(20, state_of)
    except (Damaged, rrfp.UsageError) as error:
        said = str(error)
        assert said.startswith(f"{folder / '20'}") and said.isprintable() and len(said) < 1500, said
        return None
