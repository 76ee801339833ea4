"""Sealed files: what others may have written, or could write, is not read, nor is a key that others know."""

import hmac
import os
import stat
import threading
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import pytest

from rrfp_jax.runtime.programs.executables import (
    ENDING,
    KEY_FILE,
    SEAL,
    Executables,
    SealedFiles,
    user_key,
)
from tests.attacks.conftest import NAME, STRANGER


def test_what_was_written_is_read_and_only_its_user_may(store, own, tmp_path):
    assert store.read(NAME) == b"sound" and store.read("1" * 64) is None
    file, key = store.folder / NAME, Path(own[KEY_FILE])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.folder, file, key)]
    assert modes == [0o700, 0o600, 0o600]
    assert [path.name for path in (*store.folder.iterdir(), *key.parent.iterdir())] == [NAME, key.name]


def test_a_wide_umask_opens_nothing(tmp_path):
    before = os.umask(0)
    try:
        files = SealedFiles(tmp_path / "runs" / "programs", {KEY_FILE: str(tmp_path / "keys" / "key")})
        files.write(NAME, b"sound")
    finally:
        os.umask(before)
    assert files.read(NAME) == b"sound"
    assert not any(path.stat().st_mode & 0o022 for path in (files.folder, *files.folder.iterdir()))
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "keys").rglob("*"))


def cut(path, key):
    path.write_bytes(path.read_bytes()[:-1])


def changed(path, key):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def unsealed(path, key):
    path.write_bytes(b"")


def with_a_hash_but_no_key(path, key):
    path.write_bytes(sha256(path.name.encode() + b"evil").digest() + b"evil")


def with_another_users_key(path, key):
    SealedFiles(path.parent, {KEY_FILE: str(key.with_name("another"))}).write(path.name, b"evil")


def of_another_program(path, key):
    SealedFiles(path.parent, {KEY_FILE: str(key)}).write("1" * 64, b"evil")
    os.replace(path.with_name("1" * 64), path)


def with_its_name_in_its_content(path, key):
    """As if names and contents were only put together: "a" + "bc" is "ab" + "c"."""
    seal = hmac.digest(key.read_bytes(), path.name.encode() + b"evil", sha256)
    path.write_bytes(seal + b"evil")


@pytest.mark.parametrize(
    "how",
    [
        cut,
        changed,
        unsealed,
        with_a_hash_but_no_key,
        with_another_users_key,
        of_another_program,
        with_its_name_in_its_content,
    ],
)
def test_a_file_whose_seal_does_not_hold_is_not_read(store, own, how):
    how(store.folder / NAME, Path(own[KEY_FILE]))
    with pytest.raises(PermissionError, match="damaged, or not sealed with this user's key"):
        store.read(NAME)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_file_that_others_may_write_is_not_read(store, mode):
    (store.folder / NAME).chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write it .mode {mode:o}"):
        store.read(NAME)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o720])
def test_a_folder_that_others_may_write_is_not_used(store, mode):
    """Not for reading, writing or removing, as whoever may write it may put links into it."""
    store.folder.chmod(mode)
    for use in (lambda: store.read(NAME), lambda: store.write(NAME, b"new")):
        with pytest.raises(
            PermissionError, match=r"runs/.executables is not safe, others may write it.*chmod 700"
        ):
            use()
    store.remove_unused(ENDING, float("inf"))
    store.folder.chmod(0o700)
    assert store.read(NAME) == b"sound"


@pytest.fixture
def owners(monkeypatch):
    """Whom inodes belong to, as the kernel says it of open files; else to this user."""
    found, fstat = {}, os.fstat

    def told(descriptor):
        status = fstat(descriptor)
        values = list(status)
        values[stat.ST_UID] = found.get(status.st_ino, status.st_uid)
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", told)
    return found


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_somebody_else_is_not_used(store, owners, what):
    path = store.folder / NAME if what == "file" else store.folder
    owners[path.stat().st_ino] = STRANGER
    with pytest.raises(PermissionError, match="belongs to another user"):
        store.read(NAME)


def test_what_was_opened_counts_and_not_what_has_its_name_since(store, monkeypatch, owners):
    """A swap between two looks, both ways: one of them would be fooled if it looked at the name."""
    file, other, fstat = store.folder / NAME, store.folder / "other", os.fstat
    swap = threading.Event()

    def swapped_before(descriptor):
        if swap.is_set() and fstat(descriptor).st_ino in inodes:
            swap.clear()
            os.replace(other, file)
        return fstat(descriptor)

    other.write_bytes(b"the stranger's")
    owners[other.stat().st_ino] = STRANGER
    inodes = [file.stat().st_ino, other.stat().st_ino]
    monkeypatch.setattr(os, "fstat", swapped_before)
    swap.set()
    assert store.read(NAME) == b"sound"  # opened before it was exchanged
    assert file.read_bytes() == b"the stranger's"

    store.write("other", b"sound")
    inodes[:] = [file.stat().st_ino]
    swap.set()
    with pytest.raises(PermissionError, match="belongs to another user"):
        store.read(NAME)  # the stranger's was opened, and then exchanged for a sound one
    assert not swap.is_set()


@pytest.mark.parametrize("what", ["fifo", "folder", "link to nothing", "link in a circle"])
def test_what_is_no_file_is_neither_read_nor_waited_for(store, what):
    path = store.folder / NAME
    path.unlink()
    if what == "fifo":
        os.mkfifo(path, 0o600)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if what == "link in a circle" else "nothing")
    if what == "link to nothing":
        assert store.read(NAME) is None
    else:
        with pytest.raises(OSError, match=r"no file|symbolic links"):
            store.read(NAME)


def test_what_nobody_uses_goes_and_links_are_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.touch()
    for path in (outside, store.folder / NAME):
        os.utime(path, (1, 1))
    (store.folder / f"link{ENDING}").symlink_to(outside)
    (store.folder / ".0.part").touch()
    os.utime(store.folder / ".0.part", (1, 1))
    (store.folder / "of the user").touch()
    store.remove_unused(ENDING, 2.0)
    assert sorted(path.name for path in store.folder.iterdir()) == [f"link{ENDING}", "of the user"]
    assert outside.exists()


class TestTheKey:
    def test_many_make_one(self, tmp_path):
        found, own = set(), {KEY_FILE: str(tmp_path / "keys" / "key")}
        start = threading.Barrier(8)

        def make():
            start.wait()
            found.add(user_key(own))

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1 and len(found.pop()) == SEAL
        assert [path.name for path in (tmp_path / "keys").iterdir()] == ["key"]

    def test_it_is_in_the_users_own_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert user_key({}) == user_key({}) == (tmp_path / ".rrfp" / "programs.key").read_bytes()
        assert stat.S_IMODE((tmp_path / ".rrfp").stat().st_mode) == 0o700

    def test_no_two_are_alike(self, tmp_path):
        assert user_key({KEY_FILE: str(tmp_path / "a")}) != user_key({KEY_FILE: str(tmp_path / "b")})

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
    def test_one_that_others_know_or_choose_is_refused(self, tmp_path, mode):
        own = {KEY_FILE: str(tmp_path / "key")}
        user_key(own)
        (tmp_path / "key").chmod(mode)
        with pytest.raises(PermissionError, match=r"key.* others may (read|write) it.*remove a key"):
            user_key(own)

    def test_so_is_one_of_somebody_else(self, tmp_path, owners):
        own = {KEY_FILE: str(tmp_path / "key")}
        user_key(own)
        owners[(tmp_path / "key").stat().st_ino] = STRANGER
        with pytest.raises(PermissionError, match=r"key.* it belongs to another user"):
            user_key(own)

    @pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
    def test_so_is_one_of_another_length(self, tmp_path, content):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(PermissionError, match="it has not 32 bytes"):
            user_key({KEY_FILE: str(tmp_path / "key")})

    @pytest.mark.parametrize(
        ("where", "why"),
        [("none/of/these", "No such file"), ("file/key", "Not a directory|File exists"), (".", "is no file")],
    )
    def test_one_that_cannot_be_made_is_told(self, tmp_path, where, why):
        (tmp_path / "file").touch()
        with pytest.raises(PermissionError, match=f"{why}.*{KEY_FILE}"):
            user_key({KEY_FILE: str(tmp_path / where)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize(("owner", "mode"), [(STRANGER, 0o777), (STRANGER, 0o700), (0, 0o775), (0, 0o777)])
def test_programs_in_a_folder_that_is_not_safe_are_compiled_anew(store, own, owner, mode, jax_keeps_nothing):
    """With the kernel's own owners and modes, and a real program."""
    lowered = jax.jit(lambda x: x + 1, keep_unused=True).lower(np.float32(0))
    Executables(store.folder, own).compiled(lowered, jax.devices()[:1])
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    os.chown(store.folder, owner, -1)
    store.folder.chmod(mode)
    said = []
    programs = Executables(store.folder, own, said.append)
    programs.compiled(lowered, jax.devices()[:1])
    programs.remove_unused()
    assert (programs.compiles, programs.loads) == (1, 0) and len(before) == 2
    assert len(said) == 1 and "compiled anew: its folder" in said[0] and "is not safe, " in said[0]
    assert {path.name: path.read_bytes() for path in store.folder.iterdir()} == before
