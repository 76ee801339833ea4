"""A whole backward as its two halves, one right after the other.

A fused backward and the same one in two halves are different programs, so XLA may round differently in them.
Where results must be equal to the bit under every schedule, no schedule runs the fused one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.programs.compiling import Compiled
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes


@dataclass(frozen=True)
class BackToBack:
    """I and W, called like the compiled B in their place.

    Attributes:
        traced: what they are of.
        input, weight: compiled; None for one that gives nothing.
        sums: how many sums W adds to; see `adding.py`.
    """

    traced: Differentiated
    input: Compiled | None
    weight: Compiled | None
    sums: int

    def __call__(self, *given: Any) -> list[Any]:
        """Sums, then what the backward reads -> gradients of the carry, then what W gives."""
        sums, args = given[: self.sums], given[self.sums :]
        first, second = self._takes
        made = self.input(*[args[i] for i in first]) if self.input is not None else []
        at_hand = [*args, *made]
        added = self.weight(*sums, *[at_hand[i] for i in second]) if self.weight is not None else []
        return [*made[: len(self.traced.moving_in)], *added]

    @cached_property
    def _takes(self) -> tuple[list[int], list[int]]:
        """What each takes of the arguments, and of I's outputs after them."""
        reads = self.traced.backward.reads
        end = self.traced.cotangents + len(self.traced.moving_out) + 1  # of the full argument list
        places = {place: i for i, place in enumerate(reads)}
        places |= {end + k: len(reads) + k for k in range(len(self.traced.input.outputs))}
        first, second = self.traced.input, self.traced.weight
        return [places[i] for i in first.reads], [places[i] for i in second.reads]

    @cached_property
    def temp_size_in_bytes(self) -> int:
        """What crosses from I to W, and what the larger one needs while it runs."""
        crossing = nbytes(self.traced.input.outputs[len(self.traced.moving_in) :])
        return crossing + max(temporary_bytes(self.input), temporary_bytes(self.weight))

    def memory_analysis(self) -> BackToBack:
        """As of a compiled program, whose bytes of temporaries are asked for."""
        return self
