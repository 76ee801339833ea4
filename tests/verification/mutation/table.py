"""The table of mutants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.verification.mutation import gradients, lengths, order, promises
from tests.verification.mutation.mutant import Mutant

SECTIONS: Mapping[str, Sequence[Mutant]] = {
    "Gradients": gradients.ROWS,
    "Order of messages, and waiting without end": order.ROWS,
    "Lengths, padding, evaluation": lengths.ROWS,
    "Memory, additions, keys, weights, checkpoints": promises.ROWS,
}

MUTANTS: Sequence[Mutant] = [mutant for rows in SECTIONS.values() for mutant in rows]
