"""What tells the states of a machine apart: all that its future depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from rrfp_jax.core.group import Follower, Leader, Unanimous
from rrfp_jax.core.hints import _Line
from rrfp_jax.core.scheduler import StageScheduler


def key_of(machine: Any) -> Hashable:
    """Of a scheduler, or of a rank's machine: with equal keys, those of one stage and step act alike."""
    if isinstance(machine, StageScheduler):
        return b"".join(row.states for row in machine._progress.all_rows), state_of(machine._state)
    own = key_of(machine.scheduler), frozenset(machine._early)
    if isinstance(machine, Leader):  # the position follows from what was dispatched
        return own, frozenset(machine._lacking.items())
    if isinstance(machine, Follower):
        return own, frozenset(machine._decided.items())
    if isinstance(machine, Unanimous):
        proposals = tuple(frozenset(of_round.items()) for of_round in machine._proposals)
        return own, machine._round, proposals, frozenset(machine._later), machine._in_vain
    return own


def state_of(state: Any) -> Hashable:
    """A hint's state, without how many tasks of an order are known to be past: that is found again."""
    if is_ranking(state):
        return (state[1],)
    if hasattr(state, "inner"):
        return tuple(state._replace(inner=state_of(state.inner)))
    return (state,)


def is_ranking(state: Any) -> bool:
    """Whether it is the state of `Ranked`."""
    return isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], _Line)
