"""A toy run in which one rank fails: `failing.py RANK WAY PHASE [MARK]`.

PHASE: start (joined, nothing compiled), compile (while a layer is traced), step and validation (between two
tasks), end (trained, while the others leave), or never; and, if LAYERS_MOVE is set, recompile (a layer is
traced for another split) and move (layers are on their way to other stages). WAY: kill, freeze, cut (all TCP
connections shut down, the process lives on), raise, or store (the coordination service is frozen instead).
Stages have TP ranks each, 1 unless set; messages go by TRANSPORT. The moment is written to the file that
FAILED_AT names, if it is set. With LAYERS_MOVE, the name of a folder, a checkpoint is saved there before they
do, and a start goes on from it; rank 0 writes `losses.json` there. MARK is an argument by which whoever
started the processes knows them.
"""

import ctypes
import json
import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import optax

import rrfp_jax as rrfp
from tests.scripts.small_model import microbatches, pipeline
from tests.support.layers_on_their_way import before_each_layer
from tests.support.no_mail import by_transport

RANK, WAY, PHASE = sys.argv[1:4]
STEPS, DISPATCHES = 3, 3
TP = int(os.environ.get("TP", "1"))
now = {"phase": "nothing", "dispatches": 0}  # where this process is; between which tasks of that phase


def connections():
    """The descriptors of every TCP connection of this process, whoever in it made them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    tcp = found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX
                    if tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield int(name)


def shut(descriptors):
    """Shut down connections, all at once: no other thread gets to say anything in between."""
    sys.setswitchinterval(10.0)
    for descriptor in descriptors:
        ctypes.PyDLL(None).shutdown(descriptor, socket.SHUT_RDWR)  # holds the interpreter lock
    sys.setswitchinterval(0.005)


def coordinator():
    """The process with the coordination service, a child of the launcher or, without one, of rank 0."""
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            with open(f"/proc/{name}/stat", encoding="ascii") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline", encoding="ascii") as file:
                if parent in (os.getppid(), os.getpid()) and "run/coordinator.py" in file.read():
                    return int(name)
    raise RuntimeError("there is no coordination service")


def fail():
    if "FAILED_AT" in os.environ:
        with open(os.environ["FAILED_AT"], "w", encoding="ascii") as file:
            file.write(f"{time.time()}")
    if WAY == "raise":
        raise ValueError(f"failing in {PHASE}")
    if WAY == "cut":
        shut(list(connections()))
    elif WAY == "store":
        os.kill(coordinator(), signal.SIGSTOP)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[WAY])


def at(phase):
    """Called at the point of a phase where it may happen."""
    if phase == PHASE == now["phase"] and os.environ["RRFP_RANK"] == RANK:
        enter("failed")
        fail()


def enter(phase):
    now.update(phase=phase, dispatches=0)


def failing(dispatched):
    """What notes a dispatch, such that it fails, between two tasks, when it is time."""

    def noted(*entry):
        now["dispatches"] += 1
        if now["dispatches"] > DISPATCHES:
            at("step")
            at("validation")
        dispatched(*entry)

    return noted


def on_the_way():
    if now["phase"] == "recompile":
        enter("move")  # the first layer
        return
    at("move")


def move_layers(folder):
    """Train, save, move layers, train on; from a checkpoint if there is one. Losses go to a file."""
    before_each_layer(on_the_way)
    if not trainer.restore(folder / "checkpoints"):
        list(trainer.steps(STEPS))
        trainer.save(folder / "checkpoints")
    enter("recompile")
    trainer.split = [2, 1, 1, 2]  # every stage has a block
    enter("nothing")
    losses = [report.loss for report in trainer.steps(STEPS)]
    if trainer.is_main:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def block(params, carry, mb):
    at("compile")
    at("recompile")
    return carry + jnp.tanh(carry @ params["weight"])


def batch(step):
    return microbatches(step, 4)


mesh = rrfp.Mesh(pp=4 // TP, tp=TP)
transport = os.environ.get("TRANSPORT", "socket")
split = [1, 1, 1, 3] if "LAYERS_MOVE" in os.environ else None
settings = rrfp.Settings(transport=transport)
by_transport()
trainer = rrfp.Trainer(pipeline(block), optax.sgd(0.1), data=batch, mesh=mesh, split=split, settings=settings)
trainer._world.recorder.dispatched = failing(trainer._world.recorder.dispatched)
enter("start")
at("start")
if "LAYERS_MOVE" in os.environ:
    move_layers(Path(os.environ["LAYERS_MOVE"]))
    sys.exit()
enter("compile")
trainer.start()
list(trainer.steps(1))
enter("step")
list(trainer.steps(STEPS))
enter("nothing")
trainer.evaluate(batch, steps=1)
enter("validation")
trainer.evaluate(batch, steps=2)
enter("end")
at("end")
