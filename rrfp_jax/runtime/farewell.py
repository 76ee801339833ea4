"""How a process of several ends: it tells the others, leaves its last words, and never waits for the dead.

In good order it says goodbye. After an error it says what happened to the other processes and to the
launcher, and ends at once, because JAX's own way out waits for processes that may be gone.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from time import monotonic, sleep
from types import TracebackType

from rrfp_jax.errors import Disagreement, PeerLost, TrainingError, UsageError
from rrfp_jax.runtime.lastwords import LastWords, Why
from rrfp_jax.runtime.mailbox import Gone
from rrfp_jax.runtime.watchdog import Watchdog
from rrfp_jax.runtime.world import World

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""

FLUSH_SECONDS = 1.0

HOST_SECONDS = 5.0
"""How long rank 0, if it hosts the coordination service, waits after an error for the others to end: its own
end aborts them."""


def last_words(world: World, error: BaseException) -> LastWords:
    """Why this process ends."""
    kind: Why = "failed"
    if isinstance(error, PeerLost):
        kind = "peer lost"
    elif isinstance(error, UsageError):
        kind = "refused"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    ours = isinstance(error, (UsageError, TrainingError))
    sentence = str(error) if ours else f"{type(error).__name__}: {error}".removesuffix(": ")
    if kind == "interrupted":
        sentence = "interrupted"
    told = kind == "failed" and not ours
    return LastWords(
        rank=world.rank,
        stages=world.stages[world.rank],
        kind=kind,
        sentence=sentence,
        waiting=tuple(world.waiting()),
        culprit=error.culprit if isinstance(error, (PeerLost, Disagreement)) else None,
        traceback="".join(traceback.format_exception(error)) if told else None,
    )


def exit_status(words: LastWords) -> int:
    """The exit status that goes with last words."""
    return {"refused": REFUSED, "interrupted": INTERRUPTED}.get(words.kind, FAILED)


def report(world: World, words: LastWords) -> None:
    """Tell the other processes, the launcher if there is one, and else whoever reads standard error."""
    if world.mailbox is not None:
        who = world.describe(world.rank)
        culprit = world.rank if words.culprit is None else words.culprit
        sentence = words.sentence if words.kind == "peer lost" else f"{who}: {words.sentence}"
        if words.kind == "interrupted":
            sentence = f"{who} was interrupted"
        world.mailbox.post_all("failed", culprit, sentence)
    if world.folder_descriptor is not None:
        words.write(world.folder_descriptor)  # the launcher tells it, once for all ranks
        return
    text = [words.traceback or "", f"{world.describe(world.rank)}: {words.sentence}\n"]
    text += [f"  it waited for {item}\n" for item in words.waiting]
    sys.stderr.write("".join(text))


def end(world: World, status: int) -> None:
    """End this process now, without the ways out that wait for others."""
    deadline = monotonic() + FLUSH_SECONDS
    if world.mailbox is not None:
        while not world.mailbox.flushed() and monotonic() < deadline:
            sleep(0.01)
        if world.rank == 0 and world.folder is None:
            _outlive_others(world, monotonic() + HOST_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fail(world: World, error: BaseException) -> None:
    """Report an error and end this process, with the status that goes with it."""
    words = last_words(world, error)
    report(world, words)
    end(world, exit_status(words))


def say_farewell_at_exit(world: World, silence_seconds: float) -> Watchdog:
    """From now on this process ends as described above, whatever ends it; the watchdog that sees to it."""
    assert world.mailbox is not None

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(world, error)

    def give_up(gone: Gone) -> None:
        fail(world, PeerLost(gone.sentence, gone.culprit))

    watchdog = Watchdog(world.mailbox, world.box, silence_seconds, give_up)

    def goodbye() -> None:
        assert world.mailbox is not None
        world.box.phase("ended")
        world.mailbox.post_all("goodbye")
        deadline = monotonic() + FLUSH_SECONDS
        while not world.mailbox.flushed() and monotonic() < deadline:
            sleep(0.01)
        if world.rank == 0 and world.folder is None:
            _outlive_others(world, float("inf"))
        watchdog.stop()
        world.mailbox.close()

    sys.excepthook = on_error
    atexit.register(goodbye)
    return watchdog


def _outlive_others(world: World, deadline: float) -> None:
    """Wait until all other processes have ended, or the deadline (seconds of `monotonic`)."""
    assert world.mailbox is not None
    while len(world.mailbox.gone) < world.size - 1 and monotonic() < deadline:
        world.mailbox.read_if_idle()
        sleep(0.02)
