"""Which rows, of all that a split has, make up the microbatches of a step, and in which order they come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.balance import ORDERS, Order, even_out, ordered
from rrfp_jax.data.contract import Microbatch
from rrfp_jax.data.draw import EMPTY, Draw, Drawn
from rrfp_jax.data.shuffle import mix
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown

Split: TypeAlias = Literal["train", "validation"]

Fields: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Of a microbatch, by name."""


@dataclass(frozen=True)
class Dealing:
    """The rows of a split by bucket, and how steps take them.

    Args:
        rows: by bucket, the indices of its rows among all.
        taken: by bucket, how many of them a microbatch has.
        microbatches: of a step.
        split: "train" takes rows shuffled by (seed, epoch) for ever (see `draw.py`); "validation" all of them
            in order.
        seed: of the order.
        order: of a step's microbatches, by `costs`.
        costs: by bucket, of a microbatch of it.
        even: what each row costs, float64[rows], to deal the rows of a training step evenly to the
            microbatches of their bucket; None to leave them as drawn.
    """

    rows: Sequence[NDArray[np.int64]]
    taken: tuple[int, ...]
    microbatches: int
    split: Split
    seed: int
    order: Order
    costs: Sequence[float]
    even: NDArray[np.float64] | None

    @property
    def draw(self) -> Draw:
        """Of positions among each bucket's rows."""
        return Draw(tuple(len(rows) for rows in self.rows), self.taken, self.microbatches, self.seed)

    @property
    def steps(self) -> int:
        """Steps that hold every row once: a pass of validation; an epoch of training, rounded up."""
        return self.draw.steps if self.split == "train" else self.draw.steps_of_a_pass

    def step(self, step: int) -> list[Drawn]:
        """The microbatches of `step` >= 0: the bucket of each, and indices among all rows or `EMPTY`."""
        drawn = self.draw.training(step) if self.split == "train" else self.draw.passing(step)
        found = [
            (bucket, np.where(position == EMPTY, EMPTY, self.rows[bucket][position]))
            for bucket, position in drawn
        ]
        if self.even is not None and self.split == "train":
            found = self._evened(found, self.even)
        return [found[j] for j in ordered([self.costs[bucket] for bucket, _ in found], self.order)]

    def plan(
        self, step: int, fingerprint: int, fields: Callable[[int], Fields], weights: NDArray[np.int64]
    ) -> list[Microbatch]:
        """The microbatches of `step`, as a Trainer wants them.

        Args:
            step: at least 0.
            fingerprint: of the data, for `planned`.
            fields: of a bucket.
            weights: of every row, int64[R].
        """
        return [
            Microbatch(
                fields(bucket),
                source=(fingerprint, bucket, *rows.tolist()),
                weight=float(weights[rows[rows != EMPTY]].sum()),
            )
            for bucket, rows in self.step(step)
        ]

    def _evened(self, found: list[Drawn], costs: NDArray[np.float64]) -> list[Drawn]:
        """The same rows in the same shapes, dealt evenly to the microbatches of each bucket."""
        evened = list(found)
        for bucket in {bucket: None for bucket, _ in found}:
            own = [j for j, (of, _) in enumerate(found) if of == bucket]
            rows = np.concatenate([found[j][1] for j in own])
            for j, items in zip(own, even_out(costs[rows], len(own)), strict=True):
                evened[j] = (bucket, rows[items])
        return evened


def check_dealing(microbatches: int, split: Split, validation_share: float, order: Order) -> None:
    """Refuse settings with which nothing can be dealt out.

    Raises:
        UsageError: naming the setting.
    """
    if microbatches < 1:
        raise UsageError(f"microbatches={microbatches}: a step would hold no token; give microbatches >= 1")
    if split not in ("train", "validation"):
        raise UsageError(f"split={split!r}: no such split; give 'train' or 'validation'")
    if not 0 < validation_share < 1:
        raise UsageError(f"validation_share={validation_share}: one split would be empty; give 0 < share < 1")
    if order not in ORDERS:
        raise UsageError(f"order={order!r}: microbatches come in one of the orders {', '.join(ORDERS)}")


def planned(
    microbatch: Microbatch, fingerprint: int, fields: Collection[str], known: Collection[str]
) -> tuple[int, list[int]]:
    """The bucket and the rows of a microbatch that `Dealing.plan` has planned of this data.

    Raises:
        UsageError: other data has planned it, or a field is asked for that is not known.
    """
    if unknown := sorted(set(fields) - set(known)):
        raise UsageError(f"fields {unknown}: documents have none of these; read from {list(known)}")
    planned_from, bucket, *rows = microbatch.source
    if planned_from != fingerprint:
        raise UsageError(
            f"fingerprint {planned_from:#x}: the microbatch was planned from other documents than these "
            f"({fingerprint:#x}); give every process the same"
        )
    return bucket, rows


def documents_of(
    split: Split, usable: NDArray[np.int64], validation_share: float, source: object
) -> NDArray[np.int64]:
    """Those of the usable documents that are of a split; validation has those whose index hashes lowest.

    Raises:
        UsageError: training would have none.
    """
    held = max(1, round(validation_share * len(usable)))
    if held >= len(usable):
        raise UsageError(
            f"{shown(source)}: {len(usable)} usable documents cannot be split at "
            f"validation_share={validation_share}; give more of them"
        )
    lowest = usable[np.argsort(mix(usable.astype(np.uint64)), kind="stable")]
    return np.sort(lowest[held:] if split == "train" else lowest[:held])
