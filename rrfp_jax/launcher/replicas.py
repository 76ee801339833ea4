"""Which slots of the machine run the replicas that are left once ranks were lost. Pure: no clock, no files.

A run of several replicas can do without some. Which rank is lost tells which *slot* is out of use: what a
rank of the whole run has of the machine, such as its GPUs. The ranks of what goes on are numbered anew over
the slots that are left. Parameters are in the host's memory, so any slot can take any stage: those that a
lost replica leaves behind fill the gaps of others, or wait.

Every replica must get equally many of a step's microbatches. A number of replicas that divides the whole one
can always share them so; another could not be known to. Hence `needs` has divisors only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What an attempt runs on.

    Attributes:
        replicas: of the model.
        slots: by rank, its slot.
    """

    replicas: int
    slots: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of a run on this machine.

    Attributes:
        needs: by number of replicas that the run can have, of how many ranks; the most are those of the whole
            run, which has as many slots.
        lost: those out of use.
    """

    needs: Mapping[int, int]
    lost: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """Of all slots."""
        return max(self.needs.values())

    @property
    def assignment(self) -> Assignment | None:
        """For the next attempt: as many replicas as what is left has room for; None for not even one."""
        left = [slot for slot in range(self.count) if slot not in self.lost]
        possible = [replicas for replicas, ranks in self.needs.items() if ranks <= len(left)]
        if not possible:
            return None
        most = max(possible)
        return Assignment(replicas=most, slots=tuple(left[: self.needs[most]]))

    def without(self, assignment: Assignment, ranks: Collection[int]) -> Slots:
        """After these ranks of an attempt were lost."""
        return replace(self, lost=self.lost | {assignment.slots[rank] for rank in ranks})

    def never(self, replicas: int) -> Slots:
        """Without this number of replicas, which is not the whole run's."""
        return replace(self, needs={n: ranks for n, ranks in self.needs.items() if n != replicas})

    def whole(self) -> Slots:
        """After all that were lost were replaced, or if the run is to begin with all of them again."""
        return replace(self, lost=frozenset())
