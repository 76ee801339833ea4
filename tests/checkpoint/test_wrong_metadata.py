"""Checkpoints whose small files are sealed, but wrong: refused by name, and the one before is tried."""

import json
import os
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
from rrfp_jax.checkpoint.checkpoint import Checkpoints
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.manifest import RunState
from rrfp_jax.checkpoint.orbax_files import Damaged
from rrfp_jax.runtime.processes.world import World
from rrfp_jax.train.loss_scale import LossScale
from rrfp_jax.train.nonfinite import Standing
from rrfp_jax.train.snapshot import standing_of
from tests.support.mutations import changed_bytes, changed_trees

LEAF = "params.0.w"
STATE = {"standing": asdict(Standing(loss_scale=LossScale())), "plan_hash": "ab", "config": {"rate": 0.1}}


def leaves(step):
    values = {
        ("params", "0", "w"): jnp.full((4, 2), step, jnp.float32),
        ("optimizer", "count"): jnp.int32(step),
    }
    return list(values.items())


WANTED = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves(0)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, World(), say=lambda text: None)
    for step in (10, 20):
        checkpoints.save(RunState(step=step, **STATE), leaves(step))
        checkpoints.advance(to_the_end=True)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of them, to be spoilt."""
    return shutil.copytree(saved, tmp_path / "copy")


def reseal(checkpoint, manifest=lambda content: None, metadata=lambda tree: None, seal=lambda sealed: None):
    """Change what is in the small files of a checkpoint, with checksums that are right again."""
    tree = json.loads((checkpoint / "_METADATA").read_text())
    metadata(tree)
    text = json.dumps(tree).encode()
    (checkpoint / "_METADATA").write_bytes(text)
    content = json.loads((checkpoint / "rrfp.json").read_text())["content"]
    content["files"]["_METADATA"] = [len(text), zlib.crc32(text)]
    manifest(content)
    sealed = {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    seal(sealed)
    (checkpoint / "rrfp.json").write_text(json.dumps(sealed))


def change(*way, to=None, drop=False):
    """A function that changes, or drops, what is at the end of a way through a tree."""

    def changed(tree):
        *first, last = way
        for key in first:
            tree = tree[key]
        if drop:
            del tree[last]
        else:
            tree[last] = to

    return changed


def of_leaf(key, to=None, drop=False):
    return change("leaves", LEAF, key, to=to, drop=drop)


def of_state(key, to=None, drop=False):
    return change("custom_metadata", key, to=to, drop=drop)


def of_standing(key, to=None, drop=False):
    return change("custom_metadata", "standing", key, to=to, drop=drop)


def of_scale(key, to):
    return change("custom_metadata", "standing", "loss_scale", key, to=to)


def renamed(name):
    """The leaf under another name, with its key and files to match."""

    def changed(content):
        leaf = content["leaves"].pop(LEAF)
        leaf["key"] = name.split(".")
        leaf["files"] = {path.replace(LEAF, name): written for path, written in leaf["files"].items()}
        content["leaves"][name] = leaf

    return changed


def file(path, written):
    return change("leaves", LEAF, "files", path, to=written)


def only_files(*paths):
    return of_leaf("files", {path: [32, 1] for path in paths})


SEALS = {
    "no seal": (change("crc32", drop=True), "missing required field `crc32`"),
    "no content": (change("content", drop=True), "missing required field `content`"),
    "more beside the seal": (change("more", to=1), "unknown field `more`"),
    "a seal of text": (change("crc32", to="1"), "got `str` - at `$.crc32`"),
    "a seal too large": (change("crc32", to=2**32), "at `$.crc32`"),
    "a broken seal": (change("crc32", to=1), "is not as it was written"),
    "content is a list": (change("content", to=[]), "got `array` - at `$.content`"),
}
MANIFESTS = {
    "no files": (change("files", drop=True), "missing required field `files`"),
    "no leaves": (change("leaves", drop=True), "missing required field `leaves`"),
    "more in it": (change("more", to=1), "unknown field `more`"),
    "leaves are a list": (change("leaves", to=[]), "at `$.leaves`"),
    "no size of the metadata": (
        change("files", "_METADATA", drop=True),
        "missing required field `_METADATA`",
    ),
    "another file": (change("files", "../x", to=[1, 1]), "unknown field `../x`"),
    "a size below 0": (change("files", "_METADATA", to=[-1, 1]), "at `$.files._METADATA[0]`"),
    "a size without end": (change("files", "_METADATA", to=[2**60, 1]), f"_METADATA has {2**60} bytes"),
    "a size of no machine": (change("files", "_METADATA", to=[2**70, 1]), "at `$.files._METADATA[0]`"),
    "a size and no checksum": (change("files", "_METADATA", to=[1]), "at `$.files._METADATA`"),
    "a leaf is null": (change("leaves", LEAF, to=None), "got `null`"),
    "a leaf is a list": (change("leaves", LEAF, to=[]), "got `array`"),
    "no key": (of_leaf("key", drop=True), "missing required field `key`"),
    "no shape": (of_leaf("shape", drop=True), "missing required field `shape`"),
    "no dtype": (of_leaf("dtype", drop=True), "missing required field `dtype`"),
    "no files of a leaf": (of_leaf("files", drop=True), "missing required field `files`"),
    "more of a leaf": (of_leaf("compressor", "zstd"), "unknown field `compressor`"),
    "a key of text": (of_leaf("key", "params.0.w"), "at `$.leaves[...].key`"),
    "a key of numbers": (of_leaf("key", ["params", 0, "w"]), "at `$.leaves[...].key[1]`"),
    "another key": (of_leaf("key", ["params", "1", "w"]), "has the key ['params', '1', 'w']"),
    "an empty key": (of_leaf("key", []), "has the key []"),
    "a name that leads out": (renamed(".."), "is no name of a folder"),
    "a name with a slash": (renamed("params/../../x"), "has a slash in it"),
    "an absolute name": (renamed("/etc/passwd"), "has a slash in it"),
    "a name with NUL": (renamed("params.\0"), "a character that cannot be printed"),
    "a name that clears the screen": (renamed("\x1b[2J"), "a character that cannot be printed"),
    "a name of 300 letters": (renamed("x" * 300), "has 300 bytes"),
    "a shape of text": (of_leaf("shape", "4,2"), "at `$.leaves[...].shape`"),
    "a shape below 0": (of_leaf("shape", [-4, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of fractions": (of_leaf("shape", [4.5, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of truths": (of_leaf("shape", [True, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of no machine": (of_leaf("shape", [2**70, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape without end": (of_leaf("shape", [2**62, 2]), "instead of"),
    "objects": (of_leaf("dtype", "object"), "has the dtype 'object'"),
    "text": (of_leaf("dtype", "str_"), "has the dtype 'str_'"),
    "a dtype in code": (of_leaf("dtype", "f4"), "has the dtype 'f4'"),
    "a dtype of fields": (of_leaf("dtype", "i4,i4"), "has the dtype 'i4,i4'"),
    "an unknown dtype": (of_leaf("dtype", "float33"), "has the dtype 'float33'"),
    "another size of dtype": (of_leaf("dtype", "float64"), "of 32 bytes"),
    "parts of another rank": (of_leaf("part", [4]), "has parts [4] of [4, 2]"),
    "parts of nothing": (of_leaf("part", [0, 2]), "has parts [0, 2] of [4, 2]"),
    "parts that do not fit": (of_leaf("part", [3, 2]), "has parts [3, 2] of [4, 2]"),
    "parts larger than the whole": (of_leaf("part", [8, 2]), "has parts [8, 2] of [4, 2]"),
    "half the parts": (of_leaf("part", [2, 2]), "has 2 files instead of 3"),
    "very many parts": (of_leaf("part", [1, 1]), "has 2 files instead of 9"),
    "a part beyond the last": (only_files(f"{LEAF}/.zarray", f"{LEAF}/1.0"), f"has a file '{LEAF}/1.0'"),
    "a part that leads out": (only_files(f"{LEAF}/.zarray", "../../x"), "has a file '../../x'"),
    "a part of another leaf": (only_files(f"{LEAF}/.zarray", "optimizer.count/0"), "'optimizer.count/0'"),
    "an absolute part": (only_files(f"{LEAF}/.zarray", "/dev/zero"), "has a file '/dev/zero'"),
    "no header": (only_files(f"{LEAF}/0.0", f"{LEAF}/0.1"), f"has a file '{LEAF}/0.1'"),
    "no part": (only_files(f"{LEAF}/.zarray"), "has 1 files instead of 2"),
    "a part too many": (file(f"{LEAF}/1.0", [32, 1]), "has 3 files instead of 2"),
    "a part of another size": (file(f"{LEAF}/0.0", [31, 1]), f"has a file '{LEAF}/0.0' of 31 bytes"),
    "a header without end": (file(f"{LEAF}/.zarray", [2**40, 1]), f"of {2**40} bytes"),
    "a header of another size": (file(f"{LEAF}/.zarray", [7, 1]), "instead of 7"),
    "a part with another checksum": (file(f"{LEAF}/0.0", [32, 1]), "has other bytes than were written"),
    "a checksum too large": (file(f"{LEAF}/0.0", [32, 2**32]), "at `$.leaves[...].files[...][1]`"),
    "a size of text": (file(f"{LEAF}/0.0", ["32", 1]), "at `$.leaves[...].files[...][0]`"),
}
KEYS = ("step", "data", "seed", "standing", "config", "plan_hash")
METADATA = {
    "nothing of ours": (change("custom_metadata", drop=True), "missing required field `custom_metadata`"),
    "ours is a list": (change("custom_metadata", to=[]), "at `$.custom_metadata`"),
    **{f"no {key}": (of_state(key, drop=True), f"{key} is missing") for key in KEYS},
    "another step": (of_state("step", 10), "it is of step 10"),
    "a step of text": (of_state("step", "20"), "at `$.step`"),
    "a step and a half": (of_state("step", 20.5), "at `$.step`"),
    "a step below 0": (of_state("step", -20), "at `$.step`"),
    "a step that is true": (of_state("step", True), "at `$.step`"),
    "a step that is null": (of_state("step", None), "at `$.step`"),
    "a step of no machine": (of_state("step", 2**70), "at `$.step`"),
    "a seed of text": (of_state("seed", "0"), "at `$.seed`"),
    "a seed below 0": (of_state("seed", -1), "at `$.seed`"),
    "a hash of numbers": (of_state("plan_hash", 3), "at `$.plan_hash`"),
    "standing is a list": (of_state("standing", []), "at `$.standing`"),
    "nothing stands": (of_state("standing", {}), "loss_scale is missing"),
    "more stands": (of_standing("x", 1), "'x' is unknown - at `$`"),
    "nothing was skipped": (of_standing("skipped", drop=True), "skipped is missing"),
    "less than nothing was skipped": (
        of_standing("skipped", -1),
        "at `$.skipped`",
    ),
    "a scale of text": (
        of_scale("value", "1"),
        "at `$.loss_scale",
    ),
    "a scale of 0": (of_scale("value", 0.0), "loss_scale=0.0"),
    "no scale": (
        of_scale("value", float("nan")),
        "loss_scale=nan",
    ),
    "more of a scale": (of_scale("x", 1), "'x' is unknown - at `$.loss_scale`"),
}


def restored(folder):
    """The step that is gone on from, and what was said."""
    said = []
    found = Checkpoints(folder, World(), say=said.append).restore(WANTED, check=standing_of)
    assert np.array_equal(np.asarray(found.leaves["params", "0", "w"]), np.full((4, 2), found.run.step))
    return found.run.step, said


def passed_over(folder, *parts):
    step, said = restored(folder)
    assert step == 10 and len(said) == 1, said
    assert said[0].startswith(f"the checkpoint {folder / '20'} is refused: {folder / '20'}/"), said
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


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_with_another_content(folder, case):
    manifest, said = MANIFESTS[case]
    reseal(folder / "20", manifest=manifest)
    passed_over(folder, said)


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
@pytest.mark.parametrize("name", ["rrfp.json", "_METADATA", f"{LEAF}/.zarray", f"{LEAF}/0.0"])
def test_what_is_no_file_is_not_read(folder, name, make):
    path = folder / "20" / name
    path.unlink()
    make(path)
    passed_over(folder, f"{path} cannot be read: it is no file, but a folder, a pipe or a device")


TEXTS = {
    "nothing": (b"", "no JSON: Expecting value"),
    "half": (b'{"crc32": 1', "no JSON: Expecting"),
    "no text": (b"\xff\xfe{}", "byte 0 is not UTF-8"),
    "deep": (b"[" * 10**6, "nested too deeply"),
    "a list": (b"[]", "got `array`"),
    "a key twice": (b'{"crc32": 1, "crc32": 1, "content": {}}', "the key 'crc32' is there twice"),
    "digits without end": (b'{"crc32": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    "a control character": (b'"\x1b"', "no JSON: Invalid control character"),
}


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
            assert plain == {name: {"part": None} | leaf for name, leaf in changed["leaves"].items()}

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
            expected = {"layers": [], **state}  # which the first versions did not have
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
        return CheckpointFolder(folder).open(20, standing_of)
    except (Damaged, rrfp.UsageError) as error:
        said = str(error)
        assert said.startswith(f"{folder / '20'}") and said.isprintable() and len(said) < 1500, said
        return None
