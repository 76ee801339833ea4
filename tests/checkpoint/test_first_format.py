"""A checkpoint that an earlier version wrote: read as before, and gone on from to the bit."""

import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from rrfp_jax.checkpoint.folder import CheckpointFolder, readable_checkpoints
from rrfp_jax.checkpoint.format import Damaged
from tests.support.sharded import leaves, trainer
from tests.support.stored import KINDS

ARCHIVE = Path(__file__).with_name("first_format.tar.xz")
"""Written by 5f45452: `run/2`, two stages of two devices in two replicas (`tests.support.sharded.trainer`)
after two steps; `kinds/5`, an array of every kind of number, and one in four parts."""


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder with both."""
    folder = tmp_path_factory.mktemp("first")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_every_kind_of_array_is_read(first):
    found = next(readable_checkpoints("test", first / "kinds"))
    assert (found.run.step, found.run.seed, found.run.data) == (5, 7, {"epoch": 1})
    six = np.arange(6).reshape(2, 3) % 3
    expected = {("params", "0", kind): six.astype(kind) for kind in KINDS}
    expected["params", "0", "spread"] = np.arange(32, dtype=np.float32).reshape(8, 4)
    expected["params", "0", "50%/x"] = np.float32(0.5)
    expected["params", "0", "none"] = np.zeros((0, 3), np.float32)
    expected["optimizer", "count"] = np.int32(5)
    expected["optimizer", "key"] = np.asarray(jax.random.key_data(jax.random.key(3)))
    assert found.leaves.keys() == expected.keys()
    for key, array in expected.items():
        again = found.array(key)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes()), key


@pytest.mark.slow(reason="6 s: two Trainers")
def test_it_goes_on_to_the_bit_as_one_of_today_does(first, tmp_path):
    old = trainer(2, 2, 2)
    assert old.restore(first / "run") and old.steps_done == 2
    old.save(tmp_path)
    assert (tmp_path / "2" / "params.1.up" / "zarr.json").exists()
    old_leaves = {
        key: next(readable_checkpoints("test", first / "run")).array(key) for key in _keys(first / "run", 2)
    }
    new = next(readable_checkpoints("test", tmp_path))
    assert new.leaves.keys() == old_leaves.keys()
    assert all(new.array(key).tobytes() == array.tobytes() for key, array in old_leaves.items())
    own = trainer(2, 2, 2)
    assert own.restore(tmp_path)
    assert [r.loss for r in own.steps(2)] == [r.loss for r in old.steps(2)]
    for a, b in zip(leaves(own), leaves(old), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("file", ["params.0.spread/1.0", "params.0.spread/.zarray"])
def test_a_flipped_bit_is_found(first, tmp_path, file):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "kinds" / "5" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = next(readable_checkpoints("test", tmp_path / "kinds"))
    with pytest.raises(Damaged, match=f"{file} has other bytes than were written"):
        found.array(("params", "0", "spread"))


def _keys(folder, step):
    return [leaf.key for leaf in CheckpointFolder(folder).open(step)[1].values()]
