"""What is told of a run that was looked at: who is to blame, what each rank is at, and stacks."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.launcher.why.verdict import Verdict
from rrfp_jax.runtime.processes.stacks import Thread

BOOTSTRAP = ("_bootstrap", "_bootstrap_inner")
"""Outermost in every thread but the main one, and of no interest."""


def told(verdict: Verdict, seen: Sequence[Sight], *, blamed_only: bool = False) -> str:
    """The verdict, then the Python stacks of all threads: of those that it blames first, equal ones once.

    Args:
        verdict: of the run.
        seen: its ranks.
        blamed_only: leave out the stacks of all others.
    """
    order = sorted(seen, key=lambda sight: (sight.rank not in verdict.blamed, sight.rank))
    alike: dict[str, list[str]] = {}
    for sight in order:
        if sight.rank in verdict.blamed or not blamed_only:
            alike.setdefault("\n".join(_stacks(sight)), []).append(sight.name)
    blocks = [f"{', '.join(names)}:\n{stacks}" for stacks, names in alike.items()]
    head = ["the stacks of all threads, the latest call first:"] if blocks else []
    return "\n".join([verdict.text, *head, *blocks])


def _stacks(sight: Sight) -> Sequence[str]:
    if not sight.threads:
        return [f"  none: {'it stands still' if sight.state == 'stopped' else 'it does not answer'}"]
    return [line for thread in sight.threads for line in _lines(thread)]


def _lines(thread: Thread) -> Sequence[str]:
    frames = [frame for frame in thread.frames if frame.function not in BOOTSTRAP]
    name = f"{thread.name} (main)" if thread.is_main else thread.name
    return [f"  thread {name}", *(f"    {frame.file}:{frame.line} {frame.function}" for frame in frames)]
