"""How processes are asked to stop, agree on it, and end if they cannot."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, UsageError
from rrfp_jax.launcher.supervisor import Patience
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.signals import SAVE_SECONDS, StopReason, save_seconds
from rrfp_jax.runtime.run.world import World

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 20.0


@pytest.mark.parametrize(("text", "seconds"), [("", SAVE_SECONDS), ("4", 4.0), ("0", 0.0)])
def test_the_time_to_save(text, seconds):
    assert save_seconds({"RRFP_SAVE_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-3", "nan"])
def test_nonsense_as_the_time_to_save_is_refused(text):
    with pytest.raises(UsageError, match=f"RRFP_SAVE_SECONDS={text}"):
        Patience.of({"RRFP_SAVE_SECONDS": text})


def test_all_learn_of_one_request_at_the_same_gather():
    ours, theirs = socket.socketpair()
    worlds = [World(0, 2, Mailbox(0, {1: ours})), World(1, 2, Mailbox(1, {0: theirs}))]
    agreed = {0: [], 1: []}

    def steps(world):
        for step in range(3):
            if (world.rank, step) in ((1, 1), (0, 2)):  # the second is of less account
                world.stop.request(StopReason.CTRL_C if world.rank else StopReason.ASKED)
            assert world.gather(f"step {step}", world.rank) == [0, 1]
            agreed[world.rank].append(world.stop.agreed)

    other = threading.Thread(target=steps, args=[worlds[1]])
    other.start()
    steps(worlds[0])
    other.join()
    for world in worlds:
        world.mailbox.close()
    expected = [StopReason.NOTHING, StopReason.CTRL_C, StopReason.CTRL_C]
    assert agreed == {0: expected, 1: expected}


NOTES = f"""\
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from rrfp_jax.runtime.run.signals import StopsAfterStep
from rrfp_jax.runtime.run.signals import EndsAtOnce, heard_signals
from rrfp_jax.runtime.run.world import World
world, mode = World(), sys.argv[1]
answer = StopsAfterStep(
    world, 0.5 if mode == "stuck" else 20.0, lambda why, again: print(why, again, flush=True)
)
at_start = EndsAtOnce(lambda: print("ends", flush=True), lambda: os._exit(130))
with heard_signals(signal.SIGINT, answer=at_start) as signals, signals.answered_by(answer, signal.SIGTERM):
    print("ready", flush=True)
    while not world.stop.requested: time.sleep(0.01)
    if mode != "steps": time.sleep(20.0)
    world.gather("step 0", None)
print(json.dumps([str(world.stop.agreed), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]))
"""


@pytest.mark.parametrize(
    ("mode", "number", "name"),
    [
        ("steps", signal.SIGTERM, "SIGTERM"),
        ("steps", signal.SIGINT, "Ctrl-C"),
        ("stuck", signal.SIGTERM, "SIGTERM"),
        ("twice", signal.SIGINT, "Ctrl-C"),
    ],
)
def test_a_process_answers_signals_and_ends_if_it_cannot_stop(mode, number, name):
    with subprocess.Popen(
        [sys.executable, "-c", NOTES, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        limit = threading.Timer(HANG_SECONDS, process.kill)
        limit.start()
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{name} False\n"
        if mode == "twice":
            process.send_signal(number)
            assert process.stdout.readline() == f"{name} True\n"
        began = time.monotonic()
        out, err = process.communicate()
        limit.cancel()
    assert time.monotonic() - began < HANG_SECONDS / 2
    if mode == "steps":
        assert (process.returncode, json.loads(out)) == (DONE, [name, True])
    elif mode == "stuck":
        told = f"rank 0: {name} came, and no step ended in the next 0.5 s\n"
        assert (process.returncode, err) == (FAILED, told)
    else:
        assert (process.returncode, err) == (INTERRUPTED, "")
