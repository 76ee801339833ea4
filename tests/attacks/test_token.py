"""Where the run's token comes from, and who could read it."""

import os
import stat
import threading

import pytest

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run import token as token_module
from rrfp_jax.runtime.run.token import new_token, shared_token, take_token, write_token
from tests.attacks.test_store import Bare

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path):
    """Makes a token's file; the environment that names it."""

    def make(text=TOKEN, mode=0o600):
        path = tmp_path / "run.token"
        path.write_text(text)
        path.chmod(mode)
        return {"RRFP_TOKEN_FILE": str(path)}

    return make


def test_it_is_taken_out_of_the_environment():
    environment = {"RRFP_TOKEN": TOKEN, "HOME": "/"}
    assert take_token(environment) == TOKEN.encode()
    assert environment == {"HOME": "/"} and take_token(environment) is None


def test_it_may_be_in_a_file_of_ones_own(file):
    assert take_token(file(f"{TOKEN}\n")) == TOKEN.encode()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o606, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(file, mode):
    with pytest.raises(UsageError, match=r"others may (read|write) it.*umask 077"):
        take_token(file(mode=mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_so_is_one_of_somebody_else(file):
    environment = file()
    os.chown(environment["RRFP_TOKEN_FILE"], 12345, -1)
    with pytest.raises(UsageError, match="belongs to another user"):
        take_token(environment)


@pytest.mark.parametrize("text", ["secret", "x" * 31])
def test_a_short_one_is_refused_and_not_told(file, text):
    for environment in (file(text), {"RRFP_TOKEN": text}):
        with pytest.raises(UsageError, match=f"a token of {len(text)} characters; at least 32") as caught:
            take_token(environment)
        assert text not in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, reason in (("fifo", "is no file"), (".", "is no file"), ("none", "No such file")):
        with pytest.raises(UsageError, match=reason):
            take_token({"RRFP_TOKEN_FILE": str(tmp_path / name)})


class TestOfAStep:
    def exchanged(self, *folders):
        """What the ranks of a step say or raise, each of which sees a folder."""
        store, found = Bare(), {}

        def take(rank, folder):
            try:
                found[rank] = shared_token(folder / "7-0-0.token", store, rank, len(folders), 10.0)
            except UsageError as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=take, args=own) for own in enumerate(folders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert not any(
            b"".join(store.keys.values()).count(own) for own in found.values() if type(own) is bytes
        )
        return [found[rank] for rank in range(len(folders))]

    def test_all_have_that_of_the_first_and_no_file_is_left(self, tmp_path):
        folder = tmp_path / ".rrfp"
        tokens = self.exchanged(folder, folder, folder)
        assert len({*tokens}) == 1 and len(tokens[0]) >= 32
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.iterdir())

    def test_only_the_user_may_read_it(self, tmp_path):
        write_token(tmp_path / "7-0-0.token")
        (file,) = tmp_path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_one_that_a_killed_run_has_left_is_not_used_again(self, tmp_path):
        path = tmp_path / "7-0-0.token"
        assert write_token(path) != write_token(path) == path.read_bytes()

    def test_a_folder_that_nodes_do_not_share_is_named_by_all_and_left_empty(self, tmp_path, monkeypatch):
        monkeypatch.setattr("rrfp_jax.files.SEEN_SECONDS", 0.1)
        monkeypatch.setattr(token_module.socket, "gethostname", lambda: "n7")
        own, other = tmp_path / "own", tmp_path / "other"
        other.mkdir()
        said = self.exchanged(own, own, other)
        for rank, text in enumerate(said):
            path = (other if rank == 2 else own) / "7-0-0.token"
            assert f"{path}: rank 0 writes the run's token there, but n7 has another such" in text, said
            assert "RRFP_TOKEN" in text
        assert not list(own.iterdir()) and not list(other.iterdir())

    def test_one_that_somebody_else_could_read_is_refused(self, tmp_path):
        (tmp_path / "7-0-0.token").write_text(TOKEN)
        (tmp_path / "7-0-0.token").chmod(0o644)
        store = Bare()
        store.key_value_set_bytes("rrfp/token/0", b"-")
        with pytest.raises(UsageError, match="others may read it"):
            shared_token(tmp_path / "7-0-0.token", store, 1, 2, 1.0)


def test_no_two_are_alike():
    assert len({new_token() for _ in range(100)}) == 100
