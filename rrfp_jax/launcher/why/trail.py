"""Follows an input that has not come back to where it is held up, from rank to rank. Pure.

A rank lacks an input. Its sender has sent it: then it is lost, or still on its way. Or it has not run the
task: because that lacks an input, too, and so on; or the task could have run, and the sender itself is late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp_jax.core.tasks import Direction, Input, Kind, Output, Task
from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.runtime.processes.round_board import ARRIVED, COMING, OFFERED, PRODUCED, RecordedRound


@dataclass(frozen=True)
class Lost:
    """A message that one rank has sent and the other lacks.

    Attributes:
        sender, receiver: their ranks.
        what: the message, in words.
        heard: whether the receiver has heard of it, and only its data is missing.
    """

    sender: int
    receiver: int
    what: str
    heard: bool = False


@dataclass(frozen=True)
class Late:
    """A rank that has not run a task which lacks nothing; no task if it is not in the round."""

    rank: int
    task: Task | None = None


class Trails:
    """The trails of one moment.

    Args:
        sights: of all ranks, by rank.
    """

    def __init__(self, sights: Mapping[int, Sight]) -> None:
        self._sights = sights
        self._ranks: dict[int, list[int]] = {}  # by stage replica
        for rank, sight in sorted(sights.items()):
            if sight.round is not None:
                for stage_replica in sight.round.own:
                    self._ranks.setdefault(stage_replica, list(sight.round.members) or [rank])

    def of(self, rank: int) -> list[Lost | Late]:
        """Where all that a rank lacks is held up, each place once."""
        found = (self._follow(rank, *lacked) for lacked in self._sights[rank].lacking)
        return list(dict.fromkeys(end for end in found if end is not None))

    def _follow(self, rank: int, stage_replica: int, wanted: Input) -> Lost | Late | None:
        """Where an input that a rank lacks is held up; None if its sender is not known."""
        round = self._sights[rank].round
        assert round is not None
        stage = stage_replica % round.placement.stages
        source = round.placement.source(stage, wanted)
        assert source is not None
        at, output = stage_replica - stage + source[0], source[1]
        sender = self._sender(rank, stage_replica, at)
        if sender is None:
            return None
        theirs = self._sights[sender].round
        assert theirs is not None
        if theirs.round != round.round:
            return Late(sender)
        bits = theirs.sent(at, output)
        if bits & PRODUCED:
            what = f"the input of {wanted} on stage {stage} in step {round.step}"
            return Lost(sender, rank, what, bool(round.got(stage_replica, wanted) & COMING))
        dispatched, listens = bool(bits & OFFERED), self._sights[sender].listens
        if not dispatched and listens and (lacked := _lacked_for(theirs, at, output)) is not None:
            return self._follow(sender, at, lacked)
        return Late(sender, Task(Kind(output.direction), output.chunk, output.microbatch))

    def _sender(self, rank: int, stage_replica: int, at: int) -> int | None:
        """Who sends to a rank what is for a stage replica of it; as `Layout.receivers` has it."""
        group, senders = self._ranks[stage_replica], self._ranks.get(at, [])
        if not senders:
            return None
        sender = senders[group.index(rank) * len(senders) // len(group)]
        return sender if sender in self._sights and self._sights[sender].round is not None else None


def _lacked_for(round: RecordedRound, stage_replica: int, output: Output) -> Input | None:
    """What the task of an output lacks at its own stage; None if it could run."""
    stage = stage_replica % round.placement.stages
    wanted = [Input(output.direction, output.chunk, output.microbatch)]
    if output.direction is not Direction.FORWARD:
        wanted.append(Input(Direction.FORWARD, output.chunk, output.microbatch))
    for one in wanted:
        needed = round.placement.source(stage, one) is not None
        if needed and not round.got(stage_replica, one) & ARRIVED:
            return one
    return None
