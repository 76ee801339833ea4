"""A rank's waits when it joins its run: they say what for, and end by themselves whoever stands still."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rrfp_jax.runtime.run import join as joining
from rrfp_jax.runtime.run.join import JoinWatchdog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(joining, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(joining, "REMINDER_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
class TestJoining:
    def test_the_time_left_and_what_was_tried_are_said_from_time_to_time(self, capfd):
        with JoinWatchdog(1, pytest.fail) as one:
            one.waits_for("all 4 ranks at host0:1", 100.0, lambda: "nobody answers there")
            time.sleep(0.35)
        said = capfd.readouterr().err.splitlines()
        assert set(said) == {"rank 1 waits for all 4 ranks at host0:1, 100 s left: nobody answers there"}
        assert 2 <= len(said) <= 4

    def test_it_ends_at_the_limit_whatever_it_is_stuck_in(self):
        ended, said = threading.Event(), []

        def give_up(error):
            said.append(str(error))
            ended.set()
            one.__exit__(None, None, None)  # a process would be gone

        one = JoinWatchdog(1, give_up)
        one.waits_for("all 4 ranks", 0.1, lambda: "nobody answers there")
        assert ended.wait(5.0)
        assert said == ["all 4 ranks did not come within 0.1 s: nobody answers there"]

    def test_each_wait_has_its_own_limit_and_none_outlives_the_end(self):
        given_up = []
        with JoinWatchdog(1, given_up.append) as one:
            one.waits_for("all 4 ranks", 0.1)
            one.waits_for("their addresses", 100.0)
            time.sleep(0.3)
        one.waits_for("nothing any more", 0.0)
        time.sleep(0.1)
        assert given_up == []


def rank(number, port, **more):
    """One that is started by hand."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "RRFP_COORDINATOR": f"127.0.0.1:{port}",
        "RRFP_PROCESSES": "2",
        "RRFP_RANK": str(number),
        "RRFP_TOKEN": "0123456789abcdef" * 4,
        "RRFP_JOIN_SECONDS": "2",
        **more,
    }
    command = [sys.executable, "-c", "from rrfp_jax.runtime.run.join import join; join()"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_ranks_whose_coordinator_is_gone_frozen_or_alone_end_by_themselves():
    with ExitStack() as stack:
        frozen = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        ranks = {
            "somebody answers there": rank(1, frozen),  # as a service that was stopped
            "nobody answers there": rank(1, free),
            "not all have come": rank(0, free + 1 if free < 60000 else free - 1),  # it serves itself
        }
        for one in ranks.values():
            stack.callback(one.wait)
            stack.callback(one.kill)
        said = {reason: one.communicate(timeout=90.0)[1] for reason, one in ranks.items()}
        wrong = {
            reason: text
            for reason, text in said.items()
            if ranks[reason].returncode != 1 or reason not in text or "127.0.0.1:" not in text
        }
        assert not wrong


WORKERS = """
import multiprocessing
import rrfp_jax as rrfp
rrfp.join(); rrfp.join()
from rrfp_jax.runtime.run.join import join
def joined(_): return join.cache_info().currsize
if __name__ == "__main__":
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        print(joined(0), *pool.map(joined, [0]), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_rank_that_import_its_script_join_nothing(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(WORKERS.replace("METHOD", method))
    place = {"RRFP_COORDINATOR": "127.0.0.1:9", "RRFP_PROCESSES": "1", "RRFP_RANK": "0"}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "RRFP_FOLDER": str(tmp_path)}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90.0, check=False)
    assert (done.returncode, done.stdout) == (0, "1 0\n"), done.stderr
