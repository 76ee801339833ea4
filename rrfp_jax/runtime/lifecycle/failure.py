"""How a process of several ends after an error: it says what happened, and never waits for the dead.

It leaves its last words for the launcher, tells the other processes, and ends at once, because JAX's own way
out waits for processes that may be gone.
"""

from __future__ import annotations

import traceback
from time import monotonic, sleep

from rrfp_jax.errors import (
    FAILED,
    INTERRUPTED,
    REFUSED,
    Disagreement,
    PeerLost,
    TrainingError,
    UsageError,
    text_of,
)
from rrfp_jax.printing import settle_streams, warn
from rrfp_jax.runtime.lifecycle.last_words import LastWords, Why
from rrfp_jax.runtime.processes.children import exit_now
from rrfp_jax.runtime.processes.mailbox import Failed, Mailbox
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
    sentence = text_of(error) if ours else f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
    # It goes into a frame and on terminals, which texts of any length, or with odd bytes in them, could not.
    sentence = sentence[:LONGEST_SENTENCE].encode("utf-8", "backslashreplace").decode()
    if kind == "interrupted":
        sentence = "interrupted"
    if kind == "peer lost" and world.mailbox is not None and world.mailbox.departures.is_cut_off():
        culprit, sentence = world.rank, "lost all other processes at once: cut off, if they were not killed"
    told = kind == "failed" and not ours
    return LastWords(
        rank=world.rank,
        stages=world.roster.stages[world.rank],
        kind=kind,
        sentence=sentence,
        waiting=world.waits.told(),
        culprit=culprit,
        traceback="".join(traceback.format_exception(error)) if told else None,
    )


def exit_status(words: LastWords) -> int:
    """The exit status that goes with last words."""
    return {"refused": REFUSED, "interrupted": INTERRUPTED}.get(words.kind, FAILED)


def report(world: World, words: LastWords) -> None:
    """Tell the launcher if there is one, else whoever reads standard error; then the other processes."""
    if world.folder_descriptor is not None:
        try:
            words.write(world.folder_descriptor)  # the launcher tells it, once for all ranks
        except OSError:
            warn(f"\n{words.line()}")  # a line of its own, whatever was printed before
    elif words.kind != "interrupted" or world.size > 1:  # whoever interrupts one process knows it
        text = [words.traceback or "", f"{world.describe(world.rank)}: {words.sentence}\n"]
        text += [f"  it waited for {item}\n" for item in words.waiting]
        warn("".join(text), end="")
    if world.mailbox is not None:
        who = world.describe(world.rank)
        culprit = world.rank if words.culprit is None else words.culprit
        sentence = words.sentence if words.kind == "peer lost" else f"{who}: {words.sentence}"
        if words.kind == "interrupted":
            sentence = f"{who} was interrupted"
        world.mailbox.post_all(Failed(culprit, sentence))


def flush(mailbox: Mailbox, seconds: float) -> None:
    """Have everything that was posted sent, in at most so many seconds."""
    deadline = monotonic() + seconds
    while not mailbox.flushed() and monotonic() < deadline:
        sleep(0.01)


def end(world: World, status: int) -> None:
    """End this process now, without the ways out that wait for others."""
    try:
        if world.mailbox is not None:
            flush(world.mailbox, FLUSH_SECONDS)
            world.mailbox.read()  # what is unread would reset the connections: our words could be lost
        settle_streams()
    finally:
        exit_now(status)


def fail(world: World, error: BaseException) -> None:
    """Report an error and end this process, with the status that goes with it; from any thread."""
    world.leaving.claim_end()
    status = FAILED
    try:
        words = last_words(world, error)
        status = exit_status(words)
        report(world, words)
    except Exception:
        warn(traceback.format_exc(), end="")
    finally:
        end(world, status)
