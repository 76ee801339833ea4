"""The orders in which the processes of a stage dispatch its tasks: hashed as they go, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

from rrfp_jax.core.tasks import Task
from rrfp_jax.errors import Disagreement

if TYPE_CHECKING:  # so that who only compares what was recorded need not import JAX
    from rrfp_jax.runtime.processes.world import World

TASK = Struct("<Bii")  # kind, chunk, microbatch


class OrderHash:
    """Of all that this process has dispatched; equal in any version of Python.

    Attributes:
        count: of tasks before the latest step.
        latest: the tasks of the latest step, in order.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.count = 0
        self.latest: Sequence[Task] = ()

    def add(self, tasks: Iterable[Task]) -> str:
        """Take in a step's tasks; the hash with them."""
        self.count += len(self.latest)
        self.latest = list(tasks)
        self._hash.update(b"".join(TASK.pack(*task) for task in self.latest))
        return self._hash.hexdigest()


def check_orders(
    world: World, groups: Sequence[Sequence[int]], hashes: Sequence[str], own: OrderHash, step: int
) -> None:
    """Compare the hashes of all processes; where those of a stage differ all tell what they dispatched.

    Args:
        world: the processes, all of which call this with the same hashes.
        groups: of ranks that must be equal.
        hashes: by rank.
        own: this process's.
        step: for the message.

    Raises:
        Disagreement: naming two ranks, the position and both tasks.
    """
    odd = [(group[0], rank) for group in groups for rank in group if hashes[rank] != hashes[group[0]]]
    if not odd:
        return
    orders = world.gather("the orders of dispatch", [str(task) for task in own.latest])
    for one, other in odd:
        numbered = [dict(enumerate(orders[rank], own.count + 1)) for rank in (one, other)]
        if (number := first_difference(*numbered)) is not None:
            said = difference(world.describe(one), world.describe(other), number, step, *numbered)
            raise Disagreement(said, other)
    raise Disagreement(f"{world.describe(odd[0][1])} has dispatched other tasks than its group", odd[0][1])


def first_difference(one: Mapping[int, object], other: Mapping[int, object]) -> int | None:
    """The first position that both have and at which they differ."""
    return min((at for at in one.keys() & other.keys() if one[at] != other[at]), default=None)


def difference(
    one: str, other: str, number: int, step: int, tasks: Mapping[int, object], others: Mapping[int, object]
) -> str:
    """What two processes of a stage dispatched at a position, in words."""
    return (
        f"{one} and {other} dispatched different tasks as number {number}, in step {step}: the first "
        f"{tasks[number]}, the second {others[number]}; the programs of a stage must run in one order on all "
        f"its processes"
    )
