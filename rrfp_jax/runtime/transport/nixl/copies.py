"""The copies out of slots that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import jax


class Copies:
    """Programs that read slots, by the place that each empties."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Sequence[jax.Array], float]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def since(self) -> float:
        """When the latest began (s)."""
        return max(began for _, began in self._under_way.values())

    def begin(self, place: int, tokens: Sequence[jax.Array]) -> None:
        """A place is being emptied; that has ended when all of these are ready."""
        self._under_way[place] = tokens, perf_counter()

    def ended(self) -> list[int]:
        """The places that have been emptied since the last call."""
        found = [place for place, (tokens, _) in self._under_way.items() if all(map(_is_ready, tokens))]
        for place in found:
            del self._under_way[place]
        return found


def _is_ready(array: jax.Array) -> bool:
    return bool(array.is_ready())  # type: ignore[attr-defined]
