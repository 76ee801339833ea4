"""Stored programs: loading one runs code, so whoever could put a file there would run theirs.

Every file of an attacker here is a pickle that leaves a mark when it is unpickled. None may leave one, and
what is refused is told once and does not hold up the run.
"""

import errno
import os
import pickle
from hashlib import sha256
from pathlib import Path

import jax
import pytest

from rrfp_jax.runtime.programs.executables import KEY_FILE, Executables, SealedFiles
from tests.attacks.conftest import NAME, STRANGER
from tests.support import programs


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def run(store):
    return programs.run(store.folder, environment=store._environment)


@pytest.fixture
def filled(store, jax_keeps_nothing):
    """A folder with the programs of `programs.run`, and what they give."""
    (store.folder / NAME).unlink()
    found = run(store)
    assert found["compiled"] == 2 and found["said"] == [] and run(store)["compiled"] == 0
    return store, found["results"]


def as_others_may_write(store, evil):
    store.folder.chmod(0o777)


def by_a_hash(store, evil):
    for path in store.folder.iterdir():
        path.write_bytes(sha256(path.stem.encode() + evil).digest() + evil)


def unsealed_as_they_are(store, evil):
    for path in store.folder.iterdir():
        path.write_bytes(evil)


def with_a_key_of_their_own(store, evil):
    theirs = SealedFiles(store.folder, {KEY_FILE: str(store.folder.parent / "theirs")})
    for path in store.folder.iterdir():
        theirs.write(path.name, evil)


def when_the_key_is_lost(store, evil):
    Path(store._environment[KEY_FILE]).unlink()


def when_others_know_the_key(store, evil):
    for path in store.folder.iterdir():
        store.write(path.name, evil)
    Path(store._environment[KEY_FILE]).chmod(0o644)


def as_the_stranger(store, evil):
    """Sealed rightly, by who knows the key, but owned by another user."""
    for path in store.folder.iterdir():
        store.write(path.name, evil)
        os.chown(path, STRANGER, -1)


@pytest.mark.parametrize(
    ("attack", "why", "healed"),
    [
        (as_others_may_write, "is not safe, others may write it", False),
        (by_a_hash, "not sealed with this user's key", True),
        (unsealed_as_they_are, "not sealed with this user's key", True),
        (with_a_key_of_their_own, "not sealed with this user's key", True),
        (when_the_key_is_lost, "not sealed with this user's key", True),
        (when_others_know_the_key, "others may read it", False),
        pytest.param(
            as_the_stranger,
            "it belongs to another user",
            True,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_nothing_of_a_strangers_runs_and_the_run_goes_on(filled, tmp_path, attack, why, healed):
    store, results = filled
    mark = tmp_path / "a stranger was here"
    attack(store, pickle.dumps(Mark(mark)))
    found = run(store)
    assert not mark.exists() and found["compiled"] == 2 and found["results"] == results
    assert [why in line and "is compiled anew" in line for line in found["said"]] == [True], "told once"
    again = run(store)
    assert (again["compiled"], again["said"] == []) == ((0, True) if healed else (2, False))


def test_the_mark_would_be_left(tmp_path):
    """The attacks above would be noticed."""
    pickle.loads(pickle.dumps(Mark(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("environment", [{KEY_FILE: "/nonexistent/folder/key"}, {KEY_FILE: "/dev/null/key"}])
@pytest.mark.usefixtures("jax_keeps_nothing")
def test_without_a_key_programs_are_compiled_and_that_is_said_once(tmp_path, environment):
    found = programs.run(tmp_path / "programs", environment=environment)
    assert found["compiled"] == 2 and not (tmp_path / "programs").exists()
    assert [KEY_FILE in line and "is not stored" in line for line in found["said"]] == [True]


@pytest.mark.usefixtures("jax_keeps_nothing")
@pytest.mark.parametrize("folder", ["a\0b", "x" * 300, "file/below"])
def test_a_folder_that_cannot_be_is_told(tmp_path, own, folder):
    (tmp_path / "file").touch()
    said = []
    store = Executables(tmp_path / folder, own, say=said.append)
    store.remove_unused()
    device = jax.devices()[0]
    assert programs.result(store.compiled(programs.lowered(device), [device]), device)
    assert said and all("is not" in line for line in said)


@pytest.mark.usefixtures("jax_keeps_nothing")
def test_a_disk_without_room_is_told_once_and_nothing_is_left_half(store, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (store.folder / NAME).unlink()
    said, device = [], jax.devices()[0]
    monkeypatch.setattr(os, "replace", full)
    kept = Executables(store.folder, store._environment, say=said.append)
    compiled = [kept.compiled(programs.lowered(device, factor), [device]) for factor in (1.0, 2.0)]
    assert all(programs.result(one, device) for one in compiled)
    assert [line.endswith("is not stored: No space left on device") for line in said] == [True]
    assert not list(store.folder.iterdir())
