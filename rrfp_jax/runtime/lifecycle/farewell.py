"""How a process of several ends: it tells the others, leaves its last words, and never waits for the dead.

In good order it says goodbye. After an error it says what happened to the other processes and to the
launcher, and ends at once, because JAX's own way out waits for processes that may be gone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from time import monotonic, sleep
from types import TracebackType

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED, Disagreement, PeerLost, TrainingError, UsageError
from rrfp_jax.runtime._jax import leave_run
from rrfp_jax.runtime.lifecycle.last_words import LastWords, Why
from rrfp_jax.runtime.lifecycle.watchdog import Watchdog
from rrfp_jax.runtime.processes.coordinator import Coordinator
from rrfp_jax.runtime.processes.mailbox import Gone
from rrfp_jax.runtime.processes.world import World

LONGEST_SENTENCE = 4000
"""Characters of an exception's text that are told; its traceback has them all."""

FLUSH_SECONDS = 1.0


def last_words(world: World, error: BaseException) -> LastWords:
    """Why this process ends."""
    kind: Why = "failed"
    if isinstance(error, PeerLost):
        kind = "peer lost"
    elif isinstance(error, UsageError):
        kind = "refused"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    culprit = error.culprit if isinstance(error, (PeerLost, Disagreement)) else None
    ours = isinstance(error, (UsageError, TrainingError))
    sentence = str(error) if ours else f"{type(error).__name__}: {error}".removesuffix(": ")
    # It goes into a frame and on terminals, which texts of any length, or with odd bytes in them, could not.
    sentence = sentence[:LONGEST_SENTENCE].encode("utf-8", "backslashreplace").decode()
    if kind == "interrupted":
        sentence = "interrupted"
    if kind == "peer lost" and world.mailbox is not None and world.mailbox.is_cut_off():
        culprit, sentence = world.rank, "lost all other processes at once: cut off, if they were not killed"
    told = kind == "failed" and not ours
    return LastWords(
        rank=world.rank,
        stages=world.stages[world.rank],
        kind=kind,
        sentence=sentence,
        waiting=_waiting(world),
        culprit=culprit,
        traceback="".join(traceback.format_exception(error)) if told else None,
    )


def _waiting(world: World) -> tuple[str, ...]:
    """What the main thread waits for; it may be changing that just now if this is the watchdog."""
    try:
        return tuple(world.waiting())
    except (RuntimeError, LookupError):
        return ()


def exit_status(words: LastWords) -> int:
    """The exit status that goes with last words."""
    return {"refused": REFUSED, "interrupted": INTERRUPTED}.get(words.kind, FAILED)


def report(world: World, words: LastWords) -> None:
    """Tell the launcher if there is one, else whoever reads standard error; then the other processes."""
    if world.folder_descriptor is not None:
        words.write(world.folder_descriptor)  # the launcher tells it, once for all ranks
    else:
        text = [words.traceback or "", f"{world.describe(world.rank)}: {words.sentence}\n"]
        text += [f"  it waited for {item}\n" for item in words.waiting]
        sys.stderr.write("".join(text))
    if world.mailbox is not None:
        who = world.describe(world.rank)
        culprit = world.rank if words.culprit is None else words.culprit
        sentence = words.sentence if words.kind == "peer lost" else f"{who}: {words.sentence}"
        if words.kind == "interrupted":
            sentence = f"{who} was interrupted"
        world.mailbox.post_all("failed", culprit, sentence)


def end(world: World, status: int) -> None:
    """End this process now, without the ways out that wait for others."""
    deadline = monotonic() + FLUSH_SECONDS
    if world.mailbox is not None:
        while not world.mailbox.flushed() and monotonic() < deadline:
            sleep(0.01)
        world.mailbox.read_if_idle()  # what is unread would reset the connections: our words could be lost
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fail(world: World, error: BaseException) -> None:
    """Report an error and end this process, with the status that goes with it; from any thread."""
    world.ending.acquire()
    status = FAILED
    try:
        words = last_words(world, error)
        status = exit_status(words)
        report(world, words)
    except Exception:  # such as a full disk
        traceback.print_exc()
    finally:
        end(world, status)


def say_farewell_at_exit(
    world: World, silence_seconds: float, coordinator: Coordinator | None = None
) -> Watchdog:
    """From now on this process ends as described above, whatever ends it; the watchdog that sees to it.

    One that serves the coordination service leaves last when all is well, for the others need it.
    """
    assert world.mailbox is not None

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(world, error)

    def give_up(gone: Gone) -> None:
        fail(world, PeerLost(gone.sentence, gone.culprit))

    watchdog = Watchdog(world.mailbox, world.recorder, silence_seconds, give_up)
    done = threading.Event()

    def leave_when_done() -> None:
        done.wait()
        leave_run()

    # Started now: from Python 3.12 on no thread can be once the main one has ended.
    leaving = threading.Thread(target=leave_when_done, name="rrfp-leave", daemon=True)
    leaving.start()

    def goodbye() -> None:
        assert world.mailbox is not None
        world.recorder.phase("ended")
        if coordinator is not None:
            _outlive_others(world)
            if (gone := _in_trouble(world)) is not None:
                give_up(gone)
        done.set()
        _wait_for(leaving, world)
        for act in world.on_leaving:
            act()
        world.mailbox.post_all("goodbye")  # not before: the coordinator serves until all have said it
        deadline = monotonic() + FLUSH_SECONDS
        while not world.mailbox.flushed() and monotonic() < deadline:
            sleep(0.01)
        if coordinator is not None:
            coordinator.close()
        watchdog.stop()
        world.mailbox.close()

    sys.excepthook = on_error
    atexit.register(goodbye)
    return watchdog


def _wait_for(leaving: threading.Thread, world: World) -> None:
    """Until the thread has left the coordination service, which may stand still."""
    leaving.join(min(world.silence_seconds, threading.TIMEOUT_MAX))
    if leaving.is_alive():
        fail(
            world,
            TrainingError(
                f"its work is done, but the process with the key-value store, started by the launcher or "
                f"rank 0, has not answered for {world.silence_seconds:g} s: frozen or cut off"
            ),
        )


def _in_trouble(world: World) -> Gone | None:
    """The most telling of those who did not leave in good order, through no fault of this process."""
    assert world.mailbox is not None
    gone = [one for one in world.mailbox.gone.values() if one.how != "left" and one.culprit != world.rank]
    return min(gone, key=lambda one: (one.how == "lost", one.since), default=None)


def _outlive_others(world: World) -> None:
    """Wait until all other processes have ended."""
    assert world.mailbox is not None
    while len(world.mailbox.gone) < world.size - 1:
        world.mailbox.read_if_idle()
        sleep(0.02)
