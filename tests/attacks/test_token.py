"""Where the run's token comes from, and who could read it."""

import os
import stat
import threading
import time

import pytest

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.run.token import SharedToken, new_token, take_token

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
    def test_the_others_wait_for_the_first_and_only_the_user_may_read(self, tmp_path):
        folder, found = tmp_path / ".rrfp", []
        other = threading.Thread(target=lambda: found.append(SharedToken("7-0-0", folder).read(10.0)))
        other.start()
        time.sleep(0.1)
        first = SharedToken("7-0-0", folder)
        token = first.write()
        other.join(10.0)
        assert found == [token] and len(token) >= 32
        (file,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
        first.remove()
        assert not list(folder.iterdir())

    def test_one_that_a_killed_run_has_left_is_not_used_again(self, tmp_path):
        assert SharedToken("7-0-0", tmp_path).write() != SharedToken("7-0-0", tmp_path).write()

    def test_a_folder_that_nodes_do_not_share_is_named(self, tmp_path):
        with pytest.raises(TrainingError, match=r"7-0-0.token has not come in 0 s.*RRFP_TOKEN"):
            SharedToken("7-0-0", tmp_path).read(0.1)

    def test_one_that_somebody_else_could_read_is_refused(self, tmp_path):
        (tmp_path / "7-0-0.token").write_text(TOKEN)
        (tmp_path / "7-0-0.token").chmod(0o644)
        with pytest.raises(UsageError, match="others may read it"):
            SharedToken("7-0-0", tmp_path).read(1.0)


def test_no_two_are_alike():
    assert len({new_token() for _ in range(100)}) == 100
