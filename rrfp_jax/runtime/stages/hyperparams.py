"""Hyperparameters that an optimizer keeps in its state (`optax.inject_hyperparams`), told with each step.

They are those of the update that follows a step's tasks: what of the update's program gives them is a program
of its own. It is run before the update, and its result is fetched with the step's other numbers. So nobody
waits for the update itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from rrfp_jax.runtime.autodiff.traced import reduce
from rrfp_jax.runtime.programs.compiling import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import widest
from rrfp_jax.runtime.stages.whole_optimizer import OptimizerPart, WholeOptimizer

FIELD = "hyperparams"
"""Of the states that `optax.inject_hyperparams` makes."""

SCHEDULES = "hyperparams_states"
"""Of the same, the states of schedules, by the names of their hyperparameters."""


@dataclass(frozen=True)
class Hyperparams:
    """Those of a stage's optimizer.

    Attributes:
        names: such as "learning_rate"; where several have one name, "decoder.learning_rate".
        reads: of the stage's leaves of the state, those that the program takes.
        program: leaves of the state -> a vector, as wide as float32 or float64.
        kept: of the names, those of plain numbers: no schedule gives them, so they stay what they are.
    """

    names: Sequence[str]
    reads: Sequence[int]
    program: Compiled
    kept: Collection[str]

    @classmethod
    def compile(
        cls, whole: WholeOptimizer, part: OptimizerPart, state: Sequence[Any], compiler: Compiler
    ) -> Hyperparams | None:
        """Compile for the stage's leaves of the state, given by specs; None if no hyperparameter is there."""
        places = places_of(whole)
        if not places:
            return None
        count = len(whole.paths)
        chosen = {count + place for place in places.values()}
        outputs = [i in chosen for i in range(count + len(whole.state))]
        program = reduce(whole.update, outputs)
        reads = [part.state.index(i - count) for i in program.reads]

        def numbers(*own: Any) -> Any:
            found = dict(zip(sorted(places.values()), program(*own), strict=True))
            real = widest(value.dtype for value in found.values())
            return jnp.stack([found[place].astype(real) for place in places.values()])

        kept = {name for name, place in places.items() if not _scheduled(whole, place)}
        return cls(list(places), reads, compiler(numbers, *[state[i] for i in reads]), kept)

    def __call__(self, state: Sequence[jax.Array]) -> jax.Array:
        """The numbers of the next update."""
        return self.program(*[state[i] for i in self.reads])  # type: ignore[no-any-return]

    def kept_numbers(self, state: Sequence[jax.Array]) -> dict[str, float]:
        """The plain numbers of a state, by name."""
        found = zip(self.names, self(state).tolist(), strict=True)
        return {name: value for name, value in found if name in self.kept}


def places_of(whole: WholeOptimizer) -> Mapping[str, int]:
    """Places in the state of the hyperparameters that are a number and follow from no parameter, by name."""
    found: dict[int, tuple[str, str]] = {}
    for place, (path, spec) in enumerate(whole.state):
        is_one = len(path) > 1 and path[-2] == GetAttrKey(FIELD) and isinstance(path[-1], DictKey)
        if is_one and spec.shape == () and not whole.owners[place]:
            chosen = tuple(entry for entry in path if isinstance(entry, (DictKey, SequenceKey)))
            found[place] = keystr(chosen[-1:], simple=True), keystr(chosen, simple=True, separator=".")
    counts = Counter(short for short, _ in found.values())
    return {long if counts[short] > 1 else short: place for place, (short, long) in found.items()}


def _scheduled(whole: WholeOptimizer, place: int) -> bool:
    """Whether a hyperparameter follows a schedule, which has a state of its own beside it."""
    path, _ = whole.state[place]
    beside = (*path[:-2], GetAttrKey(SCHEDULES), path[-1])
    return any(other[: len(beside)] == beside for other, _ in whole.state)
