"""How the ranks that `rrfp doctor` checks meet, and who is missing."""

import socket
import threading
import time

import jax

from rrfp_jax.commands.preflight.meeting import meet
from rrfp_jax.runtime.run.place import Address, Place
from rrfp_jax.runtime.run.world import World
from tests.support.alone import free_port


def met(ranks, folder, port, limit=20.0, count=3, sees=None):
    """What these ranks of `count` learn from each other."""
    found = {}

    def one(rank):
        place = Place(Address("127.0.0.1", port), count, rank, folder=None)
        found[rank] = meet(place, f"n{rank // 2}", "127.0.0.1", folder, limit)

    threads = [threading.Thread(target=one, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def test_all_meet(tmp_path):
    found = met(range(3), tmp_path, free_port())
    for meeting in found.values():
        assert (meeting.hosts, meeting.error) == (("n0", "n0", "n1"), "")
        assert len({*meeting.code}) == 1 and [own["jax"] for own in meeting.versions] == [jax.__version__] * 3
        assert meeting.sees_folder and meeting.sees_home and abs(meeting.ahead) <= meeting.ahead_error + 0.1
    assert len(found) == 3 and not list(tmp_path.iterdir())


def test_one_that_does_not_come_is_named(tmp_path):
    port = free_port()
    found = met([0, 2], tmp_path, port, limit=2.0)
    assert {one.error for one in found.values()} == {
        f"all 3 ranks at 127.0.0.1:{port} did not come within 2 s: rank 1 is missing: started, and alive? "
        f"--limit allows more time"
    }


def test_one_that_stands_still_once_all_are_connected_is_given_up(tmp_path, monkeypatch):
    learn = World.learn_clock
    monkeypatch.setattr("rrfp_jax.commands.preflight.meeting.CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(World, "learn_clock", lambda w, *a: time.sleep(3.0) if w.rank else learn(w, *a))
    assert "gives up waiting for the clocks" in met(range(2), tmp_path, free_port(), count=2)[0].error


def test_without_rank_0_nobody_meets(tmp_path):
    port = free_port()
    said = met([1], tmp_path, port, limit=0.5)[1].error
    assert "nobody answers there (Connection refused); is rank 0, which serves there, started" in said


def test_a_rank_without_a_home_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert "HOME='~/.rrfp': no user here has the home ~" in met([1], tmp_path, free_port())[1].error


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("", 0)) as other:
        found = met([0], tmp_path, other.getsockname()[1])[0]
    assert "in use" in found.port_taken and "rank 0 could not serve" in found.error


def test_a_folder_that_cannot_be_written_is_seen_by_nobody(tmp_path):
    (tmp_path / "file").touch()
    found = met(range(2), tmp_path / "file" / "missing", free_port(), count=2)
    assert [found[rank].sees_folder for rank in (0, 1)] == [False, False]
