"""A toy run that hangs, or seems to: `hanging.py RANK WAY [MARK]`.

WAY, on rank RANK in step 1:

    message     what it sends to the next stage is dropped from some microbatch on
    decision    of a leader: what it decides is dropped from some position on
    gather      its value for a gather is dropped
    user        the user's code, between two steps, does not return
    layer       the user's code in a layer, while that is traced, does not return
    data        loading does not return
    collective  it leaves out the sum of the replicas' gradients, in which the others wait
    callback    the user's code that a program calls on the host does not return
    lock        the user's code holds the interpreter
    freeze, kill, raise   as in failing.py
    slow        nothing: every task takes its time, and the run moves

Stages have TP ranks each, and DP replicas, 1 unless set. STEPS, 4 unless set. The moment is written to the
file that HUNG_AT names.
"""

import ctypes
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from tests.scripts.small_model import microbatches, pipeline

RANK, WAY = int(sys.argv[1]), sys.argv[2]
HERE = int(os.environ["RRFP_RANK"]) == RANK
COUNT, LATEST = 4, 2  # LATEST: the microbatch from which on messages are dropped
TP, DP, STEPS = (int(os.environ.get(name, usual)) for name, usual in (("TP", 1), ("DP", 1), ("STEPS", 4)))
now = {"step": 0, "hung": False}


def here(way):
    """Whether it is this rank's turn, in this way; says so once."""
    if not (HERE and way == WAY and now["step"] >= 1):
        return False
    if not now["hung"]:
        now["hung"] = True
        with open(os.environ["HUNG_AT"], "w", encoding="ascii") as file:
            file.write(f"{time.time()}")
    return True


def sleeps_for_ever():
    while True:
        time.sleep(0.1)


def block(params, carry, mb):
    if here("layer"):
        sleeps_for_ever()
    if WAY == "callback":
        total = jax.lax.stop_gradient(carry.sum())
        carry = carry + jax.pure_callback(on_the_host, jax.ShapeDtypeStruct((), jnp.float32), total)
    return carry + jnp.tanh(carry @ params["weight"])


def on_the_host(total):
    if here("callback"):
        sleeps_for_ever()
    return np.float32(0.0)


def batch(step):
    if step > 1 and here("data"):  # which may be on a thread that is a step ahead
        sleeps_for_ever()
    length = 16 if WAY == "layer" and step >= 1 else 8  # another shape: layers are traced anew
    return microbatches(step, COUNT * DP, length)


def dropping(post):
    """What posts messages, such that it drops those that are to be lost."""

    def posted(rank, message, *channel, **more):
        kind, key = type(message).__name__, getattr(message, "key", None)
        forward = key is not None and key.input.direction == 0
        lost = (
            kind in ("Offer", "Done", "Ask", "Written", "Mail") and forward and key.input.microbatch >= LATEST
        )
        if not (lost and here("message")) and not (kind == "Told" and here("decision")):
            post(rank, message, *channel, **more)

    return posted


def dropping_gathered(post_all):
    def posted(message, *channel, **more):
        if not (type(message).__name__ == "Gathered" and here("gather")):
            post_all(message, *channel, **more)

    return posted


ranks = int(os.environ["RRFP_PROCESSES"])
trainer = rrfp.Trainer(
    pipeline(block),
    optax.sgd(0.1),
    data=batch,
    mesh=rrfp.Mesh(pp=ranks // TP // DP, tp=TP, dp=DP),
    settings=rrfp.Settings(agreement="socket", stall_seconds=float(os.environ.get("STALL_SECONDS", "300"))),
)
mailbox = trainer._world.mailbox
if mailbox is not None:
    mailbox.post, mailbox.post_all = dropping(mailbox.post), dropping_gathered(mailbox.post_all)
trainer.start()
if WAY == "collective" and HERE:
    add = trainer._engine._add_replicas
    trainer._engine._add_replicas = lambda: None if here("collective") else add()
for report in trainer.steps(STEPS):
    print(f"step {report.step} loss {report.loss!r}", flush=True)
    now["step"] = report.step + 1
    if here("raise"):
        raise ValueError("failing in step")
    if here("freeze") or here("kill"):
        os.kill(os.getpid(), {"freeze": signal.SIGSTOP, "kill": signal.SIGKILL}[WAY])
    if here("user"):
        sleeps_for_ever()
    if here("lock"):
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # holds the interpreter
    if WAY == "slow":
        here("slow")
        time.sleep(0.2)
